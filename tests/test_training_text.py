"""The text task: tokens, windows, scores, and folders that others read."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.own_text import opened, prose, recipe, written
from torch.nn import functional as F

from regard.models import load
from regard.training._corpus import Document, read_documents, split_documents
from regard.training.tasks.text import END, TextTask


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def task(file: Path) -> TextTask:
    return opened(file)


def test_windows_count_each_held_out_token_once(task: TextTask) -> None:
    held = task.data.held_out
    for window in (64, 50, 33, len(held) - 1):
        task.n, before = window, task.n
        try:
            checks = task.held_out_batches()
        finally:
            task.n = before
        ids, counted = (torch.cat([x[name] for x in checks]) for name in ("ids", "counted"))
        assert torch.equal(ids[:, 1:][counted], held[1:].long())
        assert (ids[:, 0] == 0).all()
        assert counted.any(-1).all()
        fair = counted[1:-1].long().argmax(-1)  # where the first token that counts stands
        assert (fair >= window // 2).all()


def test_bits_per_byte_are_those_of_one_long_sum(task: TextTask, file: Path) -> None:
    torch.manual_seed(0)
    model = task.model().eval()
    held = task.data.held_out.long()
    nats = torch.zeros(len(held) - 1, dtype=torch.float64)
    with torch.no_grad():
        sums: dict[str, float] = {}
        for batch in task.held_out_batches():
            for name, value in task.evaluate_batch(model, batch).items():
                sums[name] = sums.get(name, 0.0) + value
        done = 0
        for start in [*range(0, len(held) - 1 - 64, 32), len(held) - 1 - 64]:  # later windows know more
            window = held[start : start + 65].clone()
            window[0] = 0
            logp = F.log_softmax(model(window[None, :-1])[0].double(), -1).gather(1, window[1:, None])[:, 0]
            new = slice(done - start, 64)
            nats[start : start + 64][new] = -logp[new]
            done = start + 64
    documents = split_documents(read_documents(file), 0.1)[1]
    size = sum(len(x.text.encode()) for x in documents)
    assert sums["tokens"] == len(held) - 1
    expected = float(nats.sum()) / math.log(2) / size
    assert math.isclose(task.scores(sums)["bits per byte"], expected, rel_tol=1e-6)
    assert expected < 8
    assert math.isclose(task.scores(sums)["loss"], float(nats.mean()), rel_tol=1e-6)


def test_batches_are_functions_of_the_step(task: TextTask, file: Path) -> None:
    other = opened(file)
    for step in (5, 0, 17):
        assert torch.equal(task.batch(step)["ids"], other.batch(step)["ids"])
    assert not torch.equal(task.batch(0)["ids"], task.batch(1)["ids"])
    seeded = TextTask(recipe(file, seed=1))
    seeded.open()
    assert not torch.equal(task.batch(0)["ids"], seeded.batch(0)["ids"])
    assert task.batch(0)["ids"].shape == (4, 65)
    assert task.count_predictions(task.batch(0)) == 4 * 64


def test_an_epoch_reads_every_window_once(task: TextTask) -> None:
    train = task.data.train.long()
    many = (len(train) - 1) // task.n - 1
    steps = -(-many // 4)
    ids = torch.cat([task.batch(step)["ids"] for step in range(steps)])[:many, 1:]
    said = train.tolist()
    places = {tuple(said[at : at + task.n]): at for at in range(len(said) - task.n + 1)}
    starts = sorted(places[tuple(row)] for row in ids.tolist())
    assert all(b - a == task.n for a, b in pairwise(starts))
    assert starts[0] < task.n + 1


def test_the_tokenizer_knows_the_training_part_alone(tmp_path: Path) -> None:
    names = [f"{i}.txt" for i in range(40)]
    held = {x.name for x in split_documents([Document(name, "") for name in names], 0.1)[1]}
    for i, name in enumerate(names):
        rare = "zyzzyva zyzzyva zyzzyva " if name in held else "quokka quokka quokka "
        (tmp_path / name).write_text(rare * 20 + prose(i, 4))
    task = opened(tmp_path, **{"data.vocabulary": 400})
    text = task.model().tokenizer
    assert len(text.encode(" quokka")) == 2  # <|endoftext|>, quokka
    assert len(text.encode(" zyzzyva")) > 4
    # Documents stand between ends, and none is on both sides.
    pieces = "".join(text.tokens(task.data.held_out.tolist())).split(END)
    assert pieces[0] == pieces[-1] == ""
    assert len(pieces) == len(held) + 2


def test_a_text_may_say_endoftext(tmp_path: Path) -> None:
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"{END} is what {END} means {i}. " * 20)
    task = opened(tmp_path)
    assert int((task.data.train == 0).sum()) + int((task.data.held_out == 0).sum()) == 30 + 2


def test_what_was_prepared_is_read(file: Path, tmp_path: Path, task: TextTask) -> None:
    written = opened(file, tmp_path / "prepared")
    names = sorted(x.name for x in (tmp_path / "prepared").iterdir())
    assert names == ["tokenizer.json", "tokens.safetensors"]
    again = TextTask(recipe(tmp_path / "nowhere.txt"), tmp_path / "prepared")  # the data is not read again
    again.prepare()
    again.open()
    for one in (written, again):
        assert torch.equal(one.data.train, task.data.train)
        assert torch.equal(one.data.held_out, task.data.held_out)
        assert one.data.size == task.data.size
    (tmp_path / "prepared" / "tokens.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="truncated"):
        again.open()
    with pytest.raises(ValueError, match="prepare"):
        TextTask(recipe(file), tmp_path / "empty").open()
    with pytest.raises(RuntimeError, match="not open"):
        TextTask(recipe(file)).model()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_folders_are_read_here_and_by_transformers(file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = opened(file, **{"model.bias": True})
    torch.manual_seed(1)
    model = task.model().eval()
    biases = [x for name, x in model.named_parameters() if name.endswith("q_proj.bias")]
    assert len(biases) == 2
    for bias in biases:
        torch.nn.init.normal_(bias)
    task.save(model, tmp_path / "model")
    same, theirs = load(tmp_path / "model"), AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "the key — één  is\n\n    another 🎉\t"
    ids = same.tokenizer.encode(text)
    assert ids[0] == 0
    assert tokenizer.encode(text) == ids
    assert same.tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    given = torch.tensor([ids])
    with torch.no_grad():
        expected = model(given)
        assert torch.equal(same(given), expected)
        assert torch.allclose(theirs(given).logits, expected, atol=1e-5)
    assert isinstance(same.generate("the head", 4), str)


@pytest.mark.parametrize("tied", [True, False])
def test_it_learns(file: Path, tied: bool) -> None:
    task = opened(file, **{"model.tied": tied})
    torch.manual_seed(0)
    model = task.model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def score() -> float:
        with torch.no_grad():
            batches = [task.evaluate_batch(model, x) for x in task.held_out_batches()]
        return task.scores({k: sum(x[k] for x in batches) for k in batches[0]})["bits per byte"]

    before = score()
    for step in range(30):
        batch = task.batch(step)
        (task.loss(model, batch) / task.count_predictions(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert score() < 0.7 * before
    assert all(0 < bits < before for bits in task.baselines().values())


def test_probes_are_of_the_held_out_text(task: TextTask) -> None:
    natural, again, other = task.probes()
    assert (natural.name, again.name, other.name) == ("natural", "repeated", "random")
    assert natural.ids.shape == (2, 64)
    assert (natural.ids[:, 0] == 0).all()
    joined = "".join(task.model().tokenizer.decode(row.tolist()) for row in natural.ids)
    held = task.model().tokenizer.decode(task.data.held_out.tolist())
    assert held.startswith(joined)
    assert again.block == 21  # what of 48 a window of 64 holds three times
    assert torch.equal(again.ids[:, 1:22], again.ids[:, 22:43])
