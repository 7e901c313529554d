"""What heads are asked, and what they are called then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.probe_tokenizers import CLS, SEP, WORDS, bert_like, in_transformers

from regard.interp._head_types import HEAD_TYPES, LEAST_CONFIDENCE, head_type_labels, head_type_scores
from regard.interp._probes import Probe, ProbeTokenizer, natural_probe, repeated_probes
from regard.models._tokenizer import ByteTokenizer


@pytest.mark.parametrize("make", [bert_like, in_transformers])
def test_what_stands_around_every_text(make: Any) -> None:
    reader = ProbeTokenizer(make())
    assert (reader.prefix, reader.suffix) == ([CLS], [SEP])
    assert reader.special == {0, 1, 2, 3, 4} and len(reader) == 100
    probe = natural_probe(reader, 11, 2, " ".join(f"w{i % 90}" for i in range(40)))
    words = [WORDS.index(f"w{i}") for i in range(18)]
    assert probe.ids.tolist() == [[CLS, *words[:9], SEP], [CLS, *words[9:], SEP]]
    assert probe.special.tolist() == [True] + [False] * 9 + [True] and (probe.block, probe.name) == (0, "natural")


def test_bytes_have_nothing_around() -> None:
    reader = ProbeTokenizer(ByteTokenizer())
    assert (reader.prefix, reader.suffix, reader.special, len(reader)) == ([], [], set(), 256)
    probe = natural_probe(reader, 7, 3, "to be or not to be, that is")
    assert probe.ids.tolist() == [list(b"to be o"), list(b"r not t"), list(b"o be, t")]
    assert probe.special.tolist() == [True] + [False] * 6  # the first token is a sink, whatever it is
    english = natural_probe(reader, 101, 2)
    assert english.ids.shape == (2, 101) and torch.equal(english.ids, natural_probe(reader, 101, 2).ids)
    with pytest.raises(ValueError, match="text must have at least 7 tokens"):
        natural_probe(reader, 7, 2, "short")


@pytest.mark.parametrize(
    ("before", "after", "block", "times"), [(1, 1, 7, 3), (0, 0, 5, 3), (2, 1, 2, 5), (0, 3, 3, 4), (3, 0, 3, 2)]
)
def test_repeated_texts(before: int, after: int, block: int, times: int) -> None:
    reader = ProbeTokenizer(bert_like(before, after))
    said, random = repeated_probes(reader, block, times, texts=2, vocabulary=97)
    n = before + block * times + after
    assert (said.name, random.name) == ("repeated", "random") and said.ids.shape == random.ids.shape == (2, n)
    again = repeated_probes(reader, block, times, texts=2, vocabulary=97)
    assert torch.equal(said.ids, again[0].ids) and torch.equal(random.ids, again[1].ids)
    inside = slice(before, before + block * times)
    for probe in (said, random):
        assert probe.ids[:, inside].min() >= WORDS.index("a") and probe.ids[:, inside].max() < 97
        assert probe.ids[:, :before].eq(CLS).all() and probe.ids[:, n - after :].eq(SEP).all()
        expected = [i == 0 or not before <= i < before + block * times for i in range(n)]
        assert probe.special.tolist() == expected
    for row in range(2):
        text, other = said.ids[row, inside].tolist(), random.ids[row, inside].tolist()
        assert text == text[:block] * times and len(set(text)) == block
        assert len(set(other)) == block * times and other[:block] == text[:block]
    assert said.ids[0].tolist() != said.ids[1].tolist()
    assert said.later_rows().tolist() == [before + block <= i < before + block * times for i in range(n)]
    ids = said.ids[0].tolist()
    same_at, follower_at = (said.matching_keys(shift, torch.arange(n)) for shift in (0, 1))
    assert torch.equal(said.matching_keys(1, torch.tensor([n - 1, 2])), follower_at[[n - 1, 2]])
    for i in range(n):
        for j in range(n):
            within = before <= i < before + block * times and before <= j < before + block * times
            same = within and j < i and ids[j] == ids[i]
            follows = within and j > before and j <= i and ids[j - 1] == ids[i]
            assert (bool(same_at[i, j]), bool(follower_at[i, j])) == (same, follows), (i, j)


def test_a_vocabulary_that_is_too_small() -> None:
    with pytest.raises(ValueError, match="vocabulary must have at least 21"):
        repeated_probes(ProbeTokenizer(bert_like()), 7, 3, texts=2, vocabulary=20)


# --- kinds ---------------------------------------------------------------------------------------------------------


def scores(**changes: float) -> dict[str, dict[str, dict[str, float]]]:
    """Of a head that is nothing in particular; ``natural_clean_previous=0.8`` changes one number."""
    clean = {"previous": 0.1, "previous chance": 0.05, "positional": 0.2, "convolution": 0.1, "fit": 0.9, "spread": 0.5}
    looked = {"copied": 0.1, "copied chance": 0.02, "induction": 0.1, "induction chance": 0.03, "rest": 0.8}
    found = {
        "natural": {"raw": {"sinks": 0.1}, "clean": clean | {"rest": 0.7}},
        "repeated": {"raw": {}, "clean": dict(looked)},
        "random": {"raw": {}, "clean": looked | {"induction": 0.05, "copied": 0.01}},
    }
    for name, x in changes.items():
        probe, weights, of = name.split("_", 2)
        found[probe][weights][of.replace("_", " ")] = x
    return found


def confidence(score: float, control: float, rest: float) -> float:
    return rest * max(0.0, (score - control) / (1 - control))


def test_confidence_is_its_formula() -> None:
    head = scores(natural_raw_sinks=0.68, natural_clean_previous=0.8, repeated_clean_induction=0.9)
    twin = scores(natural_raw_sinks=0.2, natural_clean_previous=0.3, repeated_clean_induction=0.04)
    twin["natural"]["clean"]["spread"] = 0.9
    found = head_type_scores(head, twin)
    assert list(found) == list(HEAD_TYPES)
    # kind: its score, its largest control, what was left when sinks were removed
    expected = {
        "sink": (0.68, 0.2, 1.0),
        "previous": (0.8, 0.3, 0.7),
        "positional": (0.2, 0.2, 0.7),
        "convolution": (0.1, 0.1, 0.7),
        "averaging": (0.5, 0.0, 0.7),  # an untrained head averages too, and is no control
        "induction": (0.9, 0.05, 0.8),  # random tokens
        "duplicate": (0.1, 0.1, 0.8),
        "content": ((1 - 0.9) * (1 - 0.5), (1 - 0.9) * (1 - 0.9), 0.7),
    }
    for name, (score, control, rest) in expected.items():
        wanted = {"score": score, "control": control, "confidence": confidence(score, control, rest)}
        assert found[name] == pytest.approx(wanted), name
    alone = head_type_scores(head, None)
    assert alone["previous"]["control"] == 0.05 and alone["sink"]["control"] == 0  # chance, and none
    assert alone["duplicate"]["control"] == 0.02 and alone["induction"]["control"] == 0.05
    assert head_type_labels(found) == ["induction", "sink", "previous"]


def test_labels_need_a_score_and_some_confidence() -> None:
    assert LEAST_CONFIDENCE == 0.2
    for name, kind in HEAD_TYPES.items():
        for score, sure, yes in (
            (kind.least, LEAST_CONFIDENCE, True),
            (kind.least - 1e-6, 0.9, False),
            (kind.least + 0.05, LEAST_CONFIDENCE - 1e-6, False),
        ):
            assert head_type_labels({name: {"score": score, "control": 0.0, "confidence": sure}}) == (
                [name] if yes else []
            )
    assert {name for name, kind in HEAD_TYPES.items() if kind.least == 0.9} == {"positional", "averaging"}


def test_what_could_not_be_shown_is_left_out() -> None:
    found = head_type_scores(scores(natural_clean_previous=math.nan, repeated_clean_copied=math.nan), None)
    assert set(HEAD_TYPES) - set(found) == {"previous", "duplicate"}
    nothing = scores(**{f"natural_clean_{x}": math.nan for x in ("fit", "spread", "convolution", "positional")})
    assert {"content", "averaging", "convolution", "positional"}.isdisjoint(head_type_scores(nothing, None))
    twin = head_type_scores(scores(), scores(natural_clean_previous=math.nan))  # a control that is not one
    assert twin["previous"]["control"] == 0.05
    image = {"natural": scores()["natural"]}
    assert set(HEAD_TYPES) - set(head_type_scores(image, image)) == {"induction", "duplicate"}
    assert (
        head_type_scores(scores(), scores(natural_raw_sinks=1.0))["sink"]["confidence"] == 0
    )  # a control of 1 leaves no room
    values = [x for row in head_type_scores(scores(), scores()).values() for x in row.values()]
    assert all(math.isfinite(x) for x in values)


def test_probes_of_images_have_no_tokens() -> None:
    probe = Probe("natural", torch.zeros(2, 3, 4, 4), torch.zeros(0, dtype=torch.bool))
    assert (probe.block, probe.start) == (0, 0)
