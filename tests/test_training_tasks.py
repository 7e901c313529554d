"""The tasks: batches are functions of the recipe and the step, held-out examples stay out, sums add up, models save."""

from __future__ import annotations

import re
from datetime import date, datetime
from pathlib import Path

import pytest
import torch
from support.small_tasks import SMALL, fresh, made

import regard
from regard.interp._head_atlas import _score_heads
from regard.models import load
from regard.training._agreement_heads import rank_agreement_heads
from regard.training._recipe import Recipe
from regard.training._task import Batch
from regard.training.tasks import TASKS
from regard.training.tasks import agreement as grammar
from regard.training.tasks import dates as written
from regard.training.tasks.agreement import AgreementTask
from regard.training.tasks.common import END, PAD, SPECIAL_TOKENS
from regard.training.tasks.written_dates import FIRST, FORMS, LAST, cardinal, change_spaces, is_held_out, year


def same(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", SMALL)
def test_a_batch_is_a_function_of_the_recipe_and_the_step(name: str) -> None:
    task = made(name)
    torch.manual_seed(5)
    first = task.batch(7)
    torch.manual_seed(6)
    task.batch(8)
    assert same(first, task.batch(7))
    assert same(first, made(name).batch(7))
    assert not same(first, task.batch(8))
    assert not same(first, made(name, seed=1).batch(7))
    assert all(len(x) == 12 for x in first.values())
    assert same(task.held_out_batches()[0], made(name, seed=1).held_out_batches()[0])  # scores of several seeds compare


@pytest.mark.parametrize("name", SMALL)
def test_pieces_add_up(name: str) -> None:
    task = made(name)
    model, batch = fresh(task), task.batch(0)
    pieces = [{key: x[at : at + 4] for key, x in batch.items()} for at in (0, 4, 8)]
    assert sum(task.count_predictions(piece) for piece in pieces) == task.count_predictions(batch)
    with torch.no_grad():
        whole = task.loss(model, batch)
        torch.testing.assert_close(sum(task.loss(model, piece) for piece in pieces), whole, rtol=1e-5, atol=1e-4)
        held = {key: x[:12] for key, x in task.held_out_batches()[0].items()}
        sums = task.evaluate_batch(model, held)
        parts = [task.evaluate_batch(model, {key: x[at : at + 6] for key, x in held.items()}) for at in (0, 6)]
    for key, value in sums.items():
        assert sum(part[key] for part in parts) == pytest.approx(value, rel=1e-5)
    scores = task.scores(sums)
    assert {"loss", task.score} <= scores.keys()
    assert 0 <= scores[task.score] <= 1
    assert task.higher_is_better


@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_parameter(name: str) -> None:
    task = made(name)
    model = fresh(task).train()
    task.loss(model, task.batch(0)).backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("name", SMALL)
def test_probes_can_be_asked_and_scored(name: str) -> None:
    task = made(name)
    probes = task.probes()
    assert probes[0].name == "natural"
    if name in ("agreement", "repeats"):
        assert [probe.name for probe in probes] == ["natural", "repeated", "random"]
        repeated, random = probes[1:]
        assert repeated.ids.shape == random.ids.shape
        assert torch.equal(
            repeated.ids[:, 1 : 1 + repeated.block], repeated.ids[:, 1 + repeated.block :][:, : repeated.block]
        )
        assert all(len(row.unique()) == len(row) for row in random.ids)
        assert int(repeated.ids[:, 1:].min()) >= len(SPECIAL_TOKENS)
    found = _score_heads(fresh(task), probes, task.run_probe, task.grid, lambda *_: None)
    paths = {"agreement": 1, "repeats": 2, "dates": 6, "digits": 3, "pixels": 6}[name.split()[0]]
    assert len(found) == paths


@pytest.mark.parametrize("name", ["agreement", "repeats", "digits"])
def test_a_saved_model_is_the_same_here_and_in_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    task = made(name)
    model = fresh(task)
    task.save(model, tmp_path)
    inputs = next(iter(task.held_out_batches()[0].values()))[:4]
    kind = transformers.AutoModelForImageClassification if name == "digits" else transformers.AutoModelForCausalLM
    theirs = kind.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = model(inputs)
        assert torch.equal(load(tmp_path)(inputs), ours)
        torch.testing.assert_close(theirs(inputs).logits, ours, rtol=1e-4, atol=1e-5)


def test_saved_dates_are_the_same_here_and_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    task = made("dates")
    model = fresh(task)
    task.save(model, tmp_path)
    batch = {name: x[:4] for name, x in task.held_out_batches()[0].items()}
    source, target = batch["source"], batch["target"]
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = task._logits(model, batch)  # type: ignore[attr-defined]
        assert torch.equal(task._logits(load(tmp_path), batch), ours)  # type: ignore[attr-defined]
        found = theirs(input_ids=source, attention_mask=(source != PAD).long(), labels=target).logits
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("3 March 1987").input_ids == model.tokenizer.encode("3 March 1987")


def test_words_and_characters_are_read_and_written() -> None:
    words = fresh(made("agreement")).tokenizer
    ids = words.encode("the keys to the cabinet")
    assert words.tokens(ids) == ["<s>", "the", "keys", "to", "the", "cabinet"]
    assert words.decode(ids) == "the keys to the cabinet"
    letters = fresh(made("dates")).tokenizer
    ids = letters.encode("3  March\n1987")
    assert letters.tokens(ids)[:3] == ["3", " ", " "]
    assert letters.tokens(ids)[-1] == "</s>"
    assert letters.tokens(ids)[8] == "<unk>"
    assert letters.decode(letters.encode("1987-03-03")) == "1987-03-03"


# The grammar, read by rules of its own.
SINGULAR = {"is", "was", "seems", "looks", "remains", "appears", "becomes", "stays"}
SENTENCE = re.compile(
    r"<s> (?:(?:today|often|sometimes|perhaps) )?(?:the|my|your|our) "
    r"(?:(?:old|new|red|small|clean|quiet|strange|famous) )?"
    r"(?P<subject>\w+)(?P<rest>(?: (?:to|near|of|with|behind|beside|above|under) (?:the|my|your|our)"
    r"(?: (?:old|new|red|small|clean|quiet|strange|famous))? \w+){0,5}) (?P<verb>\w+) \w+ \. </s>(?: <pad>)*"
)
PLURAL = re.compile(r"(?:.*s|children|women|men|mice)$")


def sentences_of(batch: Batch) -> list[list[str]]:
    return [[grammar.VOCABULARY[i] for i in row] for row in batch["ids"].tolist()]


def test_every_verb_agrees_with_its_subject_and_nothing_else_tells() -> None:
    task = made("agreement", batch=1500)
    batch = task.batch(3)
    plural = distractors = together = 0
    for row, subject, verb, number in zip(
        sentences_of(batch), batch["subject"].tolist(), batch["verb"].tolist(), batch["plural"].tolist(), strict=True
    ):
        found = SENTENCE.fullmatch(" ".join(row))
        assert found, row
        assert (row[subject], row[verb]) == (found["subject"], found["verb"])
        assert bool(number) == bool(PLURAL.match(row[subject])) == (row[verb] not in SINGULAR)
        nouns = [word for word in row[subject + 1 : verb] if word in grammar.NOUNS]
        plural += number
        distractors += len(nouns)
        together += sum(bool(PLURAL.match(noun)) == bool(number) for noun in nouns)
    assert len(set(grammar.VOCABULARY)) == len(grammar.VOCABULARY)  # no word is of two kinds
    assert 0.45 < plural / 1500 < 0.55
    assert 0.45 < together / distractors < 0.55  # a distractor says nothing of the subject


def test_held_out_nouns_are_never_trained_on() -> None:
    def nouns(batch: Batch) -> set[tuple[str, ...]]:
        return {tuple(word for word in row if word in grammar.NOUNS) for row in sentences_of(batch)}

    task = made("agreement", batch=2000, **{"data.checks": 600})
    held = set().union(*(nouns(batch) for batch in task.held_out_batches()))
    assert min(map(len, held)) == 4  # a subject and three distractors at least
    assert len(held) > 590
    trained = set().union(*(nouns(task.batch(step)) for step in range(3)))
    assert not held & trained
    # The rule itself keeps the two apart, and it reads all nouns.
    words = {word: i for i, word in enumerate(grammar.NOUNS)}
    for found, wanted in ((held, True), (trained, False)):
        rows = [[words[word] for word in row] for row in found]
        there = torch.tensor([[k < len(row) for k in range(6)] for row in rows])
        ids = torch.tensor([row + [0] * (6 - len(row)) for row in rows])
        assert bool(((grammar.hash_nouns(ids, there) % grammar.HELD_OUT_SHARE == 0) == wanted).all())


def test_agreement_is_judged_by_number_among_verbs_alone() -> None:
    task = made("agreement")
    batch = task.held_out_batches()[0]
    assert isinstance(task, AgreementTask)
    at, subject = task.verb_and_subject_positions(batch)
    assert bool((at - subject >= 9).all())  # three phrases of three words at least lie between
    n, vocabulary = batch["ids"].shape[1] - 1, len(grammar.VOCABULARY)
    logits = torch.zeros(len(at), n, vocabulary)
    logits[..., 0] = 9.0  # no verb
    other = torch.tensor([grammar.IDS["are"] if p else grammar.IDS["is"] for p in batch["plural"].tolist()])
    logits[torch.arange(len(at)), at, other] = 1.0
    assert bool(task.is_correct(logits, batch).all())
    wrong = grammar.FIRST_VERB + ((other - grammar.FIRST_VERB) ^ 1)
    logits[torch.arange(len(at)), at, wrong] = 2.0
    assert not bool(task.is_correct(logits, batch).any())


def test_agreement_heads_measure_what_a_head_is_worth_and_where_it_looks() -> None:
    task = made("agreement")
    model = fresh(task)
    assert isinstance(task, AgreementTask)
    rows = rank_agreement_heads(task, model)
    assert [row.keys() for row in rows] == [{"path", "head", "lost", "attention"}] * 4
    assert {row["path"] for row in rows} == {"decoder.blocks.0.attention"}
    assert [row["lost"] for row in rows] == sorted((row["lost"] for row in rows), reverse=True)
    batch = task.held_out_batches()[0]
    with torch.no_grad(), regard.watch(model, regard.Observe(keep=True)) as seen:
        model(batch["ids"][:, :-1])
        without = regard.interp.ablate(model, [(0, rows[0]["head"])], by="mean", over=batch["ids"][:, :-1])
        before = task.evaluate_batch(model, batch)["right"]
        with without:
            after = task.evaluate_batch(model, batch)["right"]
    assert rows[0]["lost"] == pytest.approx((before - after) / len(batch["ids"]))
    at, subject = task.verb_and_subject_positions(batch)
    head = rows[0]["head"]
    weights = [seen["decoder.blocks.0.attention"].weights(head, batch=b)[at[b], subject[b]] for b in range(len(at))]
    assert rows[0]["attention"] == pytest.approx(float(torch.stack(weights).mean()), rel=1e-5)


def test_a_copy_tells_what_follows() -> None:
    task = made("repeats", batch=300)
    batch = task.batch(0)
    starts, blocks = set(), set()
    for ids, copied in zip(batch["ids"].tolist(), batch["copied"].tolist(), strict=True):
        places = [i for i, x in enumerate(copied) if x]
        again, block = places[0] - 1, len(places) + 1
        assert places == list(range(places[0], places[0] + len(places)))
        first = ids.index(ids[again])
        assert first + block <= again
        assert ids[again : again + block] == ids[first : first + block]
        assert 8 <= block <= 32
        others = ids[:again] + ids[again + block :]
        assert len(set(others)) == len(others) == 65 - block  # nothing else comes twice
        starts.add(first)
        blocks.add(block)
    assert len(starts) > 20
    assert len(blocks) > 20
    held = {tuple(row) for row in task.held_out_batches()[0]["ids"].tolist()}
    assert not held & {tuple(row) for step in range(5) for row in task.batch(step)["ids"].tolist()}


def test_dates_are_what_an_independent_reader_reads() -> None:
    formats = {
        0: "%d %B %Y",
        1: "%B %d, %Y",
        5: "%a %d %b %Y",
        6: "%a, %d %b %Y",
        7: "%A, %B %d, %Y",
        9: "%Y %B %d",
        10: "%d-%b-%Y",
        11: "%b. %d, %Y",
        13: "%d.%m.%Y",
        14: "%Y/%m/%d",
        15: "%Y%m%d",
        16: "%Y-%m-%d",
    }
    days = [date.fromordinal(FIRST.toordinal() + k) for k in range(0, (LAST - FIRST).days, 97)]
    for number, form in formats.items():
        for day in days:
            assert datetime.strptime(FORMS[number](day), form).date() == day
    for day in days:  # 3rd → 3, for those that endings stand after
        for number, form in (
            (2, "%B %d, %Y"),
            (3, "%d of %B %Y"),
            (4, "the %d day of %B, %Y"),
            (8, "%A the %d of %B %Y"),
        ):
            text = re.sub(r"(\d)(?:st|nd|rd|th)\b", r"\1", FORMS[number](day))
            assert datetime.strptime(text, form).date() == day
    assert FORMS[12](date(1987, 9, 3)) == "3.ix.1987"
    assert FORMS[17](date(1987, 3, 3)) == "the third of March, nineteen eighty-seven"
    assert FORMS[17](date(2005, 8, 31)) == "the thirty-first of August, two thousand and five"
    assert FORMS[18](date(2005, 8, 12)) == "August the twelfth, 2005"
    assert [year(y) for y in (1900, 1905, 2000, 2010, 2099)] == [
        *("nineteen hundred", "nineteen oh five", "two thousand", "twenty ten", "twenty ninety-nine")
    ]
    assert len({cardinal(k) for k in range(1, 100)}) == 99
    assert len(FORMS) >= 12


def test_no_text_is_written_for_two_dates() -> None:
    """However it is spaced and whatever its case: every source has one answer."""
    read: dict[str, date] = {}
    for k in range(0, (LAST - FIRST).days, 41):
        day = date.fromordinal(FIRST.toordinal() + k)
        for form in FORMS:
            for how in range(4):
                assert read.setdefault(change_spaces(form(day), how).lower(), day) == day
    assert change_spaces("3 March 1987", 3) == "3March1987"
    assert change_spaces("1 2 a", 3) == "1 2a"
    assert change_spaces("3 March", 2) == "3  March"


def test_held_out_dates_are_trained_on_in_no_form() -> None:
    task = made("dates", batch=1000, **{"data.checks": 500})

    def targets(batch: Batch) -> set[str]:
        assert bool((batch["target"][:, -1] == END).all())
        return {"".join(written.VOCABULARY[i] for i in row[:-1]) for row in batch["target"].tolist()}

    held = set().union(*(targets(batch) for batch in task.held_out_batches()))
    trained = set().union(*(targets(task.batch(step)) for step in range(3)))
    assert not held & trained
    for texts, wanted in ((held, True), (trained, False)):
        assert {is_held_out((date.fromisoformat(text) - FIRST).days) for text in texts} == {wanted}
    ends = (task.batch(0)["source"] == END).sum(-1)
    assert bool((ends == 1).all())
    assert int((task.batch(0)["source"] == 3).sum()) == 0  # every character is known


def test_one_pass_tells_what_greedy_writing_writes() -> None:
    """A model that knows one date by heart: exact match is what ``generate`` writes, right and wrong."""
    task = made("dates", batch=1, **{"model.d": 32, "model.layers": 1, "model.hidden": 64})
    torch.manual_seed(0)
    model = task.model().train()
    batch = task.batch(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (task.loss(model, batch) / task.count_predictions(batch)).backward()
        optimizer.step()
    model.eval()
    whole = {name: x[:3] for name, x in task.held_out_batches()[0].items()}
    found = []
    for asked in (batch, whole):
        with torch.no_grad():
            right = task.evaluate_batch(model, asked)["right"]
        rows = [[i for i in row if i != PAD] for row in asked["source"].tolist()]
        ids = [model.generate([row], 11)[0].tolist() for row in rows]
        found.append(right)
        assert right == sum(row == target for row, target in zip(ids, asked["target"].tolist(), strict=True))
    assert found == [1.0, 0.0]


def test_the_registry_names_every_task() -> None:
    for name, kind in TASKS.items():
        assert kind.name == name == kind.default_recipe.task
        assert kind.description
        assert isinstance(kind.default_recipe, Recipe)
