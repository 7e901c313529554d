"""The head atlas from end to end on tiny models, untrained twins, and rollout against the dense product."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from support.checkpoints import make, write
from support.model_configs import BERT, GPT2, IMAGES, T5, VIT, ids
from support.probe_tokenizers import bert_like, in_transformers
from torch import Tensor, nn

from regard import Observe, Padding, watch
from regard.interp import ablate
from regard.interp._atlas_comparison import head_pair_csv, mean_depth, pair_heads
from regard.interp._atlas_table import ATLAS_COLUMNS
from regard.interp._head_atlas import Atlas, atlas, untrained_copy
from regard.interp._head_types import HEAD_TYPES
from regard.interp._probes import text_probes
from regard.interp._rollout import rollout
from regard.models import load
from regard.models._tokenizer import ByteTokenizer
from regard.nn import Decoder, Encoder, EncoderDecoder, VisionTransformer

pytestmark = pytest.mark.usefixtures("full_tiles")
SIZES = {"tokens": 23, "block": 7}
WORDS = " ".join(f"w{(i * i) % 89}" for i in range(200))


def decoder(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return Decoder(12, heads=3, layers=2, vocab=256, **options).eval()


TEXTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int, int]] = {
    "ours": (decoder, ByteTokenizer, 2, 3),
    "ours both": (lambda: EncoderDecoder(12, heads=3, layers=1, vocab=256).eval(), ByteTokenizer, 3, 3),
    "gpt2": (lambda: make("GPT2LMHeadModel", GPT2 | {"vocab_size": 100, "n_positions": 29}), in_transformers, 2, 3),
    "bert": (lambda: make("BertModel", BERT | {"vocab_size": 100, "max_position_embeddings": 29}), bert_like, 2, 3),
    "t5": (lambda: make("T5ForConditionalGeneration", T5 | {"vocab_size": 100, "num_layers": 1}), bert_like, 3, 3),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_from_end_to_end(kind: str, tmp_path: Path) -> None:
    build, tokenizer, layers, heads = TEXTS[kind]
    torch.manual_seed(0)
    model, calls = build(), []
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = atlas(model, tokenizer(), text=WORDS * 3, **SIZES, progress=lambda k, of: calls.append((k, of)))
    torch.manual_seed(11)  # another state of torch's generator changes nothing
    again = atlas(model, tokenizer(), text=WORDS * 3, **SIZES)
    assert found.to_json() == again.to_json() and found.model == type(model).__name__
    assert repr(found) == f"Atlas of {layers * heads} heads of {type(model).__name__}"
    total = 2 * 3 * layers  # twins, probes, layers
    assert calls == [(k + 1, total) for k in range(total)]
    assert [(row["layer"], row["head"]) for row in found.rows] == [(i, h) for i in range(layers) for h in range(heads)]
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])
    for row in found.rows:
        assert set(row["scores"]) == set(row["untrained"]) == {"natural", "repeated", "random"}
        assert all(row[name] is None or math.isfinite(row[name]) for name in ATLAS_COLUMNS)
        across = "cross" in row["path"].lower() or "EncDec" in row["path"]  # nothing is before or after anything there
        assert row["sinks"] is not None and row["value_weighted"] is not None and row["spread"] is not None
        assert all((row[name] is None) == across for name in ("induction", "previous", "duplicate", "distance"))
        assert not across or set(row["kinds"]) == {"sink", "averaging"}
        assert row["scores"] != row["untrained"]
    check_files(found, tmp_path)
    for column in ("sinks", "averaging confidence", "induction"):
        pairs = found.top(column, 2)
        values = [
            row[column] if column in ATLAS_COLUMNS else row["kinds"]["averaging"]["confidence"] for row in found.rows
        ]
        places = {(row["path"], row["head"]): x for row, x in zip(found.rows, values, strict=True)}
        assert [places[pair] for pair in pairs] == sorted(x for x in values if x is not None)[::-1][:2]
        with torch.no_grad(), ablate(model, pairs):
            run(model, torch.ones(1, 5, dtype=torch.int64))
    alone = atlas(
        model, tokenizer(), text=WORDS * 3, **SIZES, control=False, progress=lambda k, of: calls.append((k, of))
    )
    assert calls[-1] == (total // 2, total // 2) and all(row["untrained"] is None for row in alone.rows)
    assert json.dumps([row["scores"] for row in alone.rows]) == json.dumps([row["scores"] for row in found.rows])


def run(model: nn.Module, text: Tensor) -> Any:
    if isinstance(model, EncoderDecoder):
        return model(text, text)
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model(input_ids=text, decoder_input_ids=text) if both else model(text)


def check_files(found: Atlas, folder: Path) -> None:
    read = json.loads(found.to_json(folder / "a.json"), parse_constant=lambda x: pytest.fail(f"{x} is no JSON"))
    assert json.loads((folder / "a.json").read_text()) == read and read["columns"] == ATLAS_COLUMNS
    assert [row["head"] for row in read["heads"]] == [row["head"] for row in found.rows]
    found.to_csv(folder / "a.csv")
    lines = list(csv.DictReader(io.StringIO((folder / "a.csv").read_text())))
    for line, row in zip(lines, found.rows, strict=True):
        assert (line["path"], int(line["layer"]), int(line["head"])) == (row["path"], row["layer"], row["head"])
        assert {name: float(line[name]) if line[name] else None for name in ATLAS_COLUMNS} == {
            k: row[k] for k in ATLAS_COLUMNS
        }
        assert line["labels"].split() == row["labels"]
        for kind in HEAD_TYPES:
            sure = row["kinds"].get(kind, {}).get("confidence")
            assert line[f"{kind} confidence"] == ("" if sure is None else str(sure))
    assert found.table().row_count == len(found.rows) and found.table("sinks", 2).row_count == 2
    Console(file=io.StringIO()).print(found.table("sinks"))


def cells(table: Table, column: str) -> list[str]:
    return [str(x) for x in next(c for c in table.columns if c.header == column).cells]


def test_comparing() -> None:
    options = {"control": False, **SIZES}
    a, b = (atlas(decoder(seed), ByteTokenizer(), **options) for seed in (0, 1))
    table = a.compare(b, "distance", 4)
    changes = [y["distance"] - x["distance"] for x, y in zip(a.rows, b.rows, strict=True)]
    order = sorted(range(6), key=lambda i: -abs(changes[i]))[:4]
    assert cells(table, "change") == [f"{changes[i]:+.2f}" for i in order]
    assert cells(table, "head A") == cells(table, "head B") == [f"{i // 3}.{i % 3}" for i in order]
    with pytest.raises(TypeError, match="other"):
        a.compare(a.rows)
    with pytest.raises(ValueError, match="by must be"):
        a.compare(b, by="colour")
    with pytest.raises(ValueError, match="column must be None"):
        a.compare(b, "sinks", by="types")
    for wrong in (lambda: a.compare(b, "colour"), lambda: a.top("colour"), lambda: a.table("colour")):
        with pytest.raises(ValueError, match=r"column must be one of .*'colour'"):
            wrong()


@pytest.mark.parametrize("shape", [{"heads": 2, "layers": 2}, {"heads": 3, "layers": 4}])
def test_comparing_other_shapes(shape: dict[str, int]) -> None:
    """Heads are matched one to one, the nearest pairs first; types are compared by count and depth."""
    options = {"control": False, **SIZES}
    torch.manual_seed(1)
    a = atlas(decoder(), ByteTokenizer(), **options)
    b = atlas(Decoder(12, vocab=256, **shape).eval(), ByteTokenizer(), **options)
    pairs = pair_heads(a, b)
    count = min(len(a.rows), len(b.rows))
    assert len(pairs) == count
    for rows in ([pair.first for pair in pairs], [pair.second for pair in pairs]):
        assert len({(row["path"], row["head"]) for row in rows}) == count
    for pair in pairs:
        difference = [pair.first["kinds"][kind]["score"] - pair.second["kinds"][kind]["score"] for kind in HEAD_TYPES]
        assert pair.distance == pytest.approx(math.sqrt(sum(x * x for x in difference) / len(HEAD_TYPES)))
    distances = [pair.distance for pair in pairs]
    assert distances == sorted(distances)
    assert a.compare(b, limit=3).row_count == 3 and a.compare(b, "spread").row_count == count

    table = a.compare(b, by="types")
    for kind, first, second in zip(*(cells(table, name) for name in ("type", "heads A", "heads B")), strict=True):
        assert (int(first), int(second)) == (a.counts[kind], b.counts[kind])
    layers = shape["layers"]
    for kind in HEAD_TYPES:
        depths = [(row["layer"] + 0.5) / layers for row in b.rows if kind in row["labels"]]
        assert mean_depth(b, kind) == (pytest.approx(sum(depths) / len(depths)) if depths else None)
    lines = list(csv.DictReader(io.StringIO(head_pair_csv(a, b))))
    assert [(line["path"], line["other path"]) for line in lines] == [
        (pair.first["path"], pair.second["path"]) for pair in pairs
    ]


def test_a_model_is_nearest_to_itself() -> None:
    """The heads of a model in another order: each finds itself."""
    a = atlas(decoder(), ByteTokenizer(), control=False, **SIZES)
    shuffled = Atlas("shuffled", a.rows[::-1])
    for pair in pair_heads(a, shuffled):
        assert pair.distance == 0 and pair.first is pair.second


def test_own_probes() -> None:
    model = decoder()
    probes = text_probes(model, ByteTokenizer(), None, **SIZES).probes
    options = {"control": False}
    own = atlas(model, probes=probes, **options)
    usual = atlas(model, ByteTokenizer(), **options, **SIZES)
    assert json.loads(own.to_json())["heads"] == json.loads(usual.to_json())["heads"]
    assert "user" in own.source
    alone = atlas(model, probes=probes[:1], **options)
    assert {"induction", "duplicate"}.isdisjoint(alone.rows[0]["kinds"])
    for wrong in ({"probes": probes[1:]}, {"probes": probes, "text": "a"}, {"probes": [probes[0], probes[0]]}):
        with pytest.raises(ValueError, match="probes"):
            atlas(model, **wrong)
    with pytest.raises(TypeError, match="probes"):
        atlas(model, probes=[3])


def test_probes_fit_the_model_and_its_vocabulary() -> None:
    """Without sizes of the user's own, the probes are as long as the model and its vocabulary allow."""
    theirs = make("GPT2LMHeadModel", GPT2 | {"vocab_size": 100, "n_positions": 29})
    natural, repeated, random = text_probes(theirs, in_transformers()).probes
    assert natural.ids.shape[1] == 29 and repeated.ids.shape == random.ids.shape and repeated.ids.shape[1] <= 29
    small = Decoder(12, heads=3, layers=1, vocab=96).eval()
    assert text_probes(small, ByteTokenizer()).probes[1].block == 32
    assert len(atlas(small, ByteTokenizer(), text="A" * 999, control=False).rows) == 3


def test_refusals(tmp_path: Path) -> None:
    model = decoder()
    with pytest.raises(TypeError, match="model must be"):
        atlas(3)
    with pytest.raises(ValueError, match="Decoder has no tokenizer"):
        atlas(model)
    for given in ({"images": torch.zeros(1, 3, 4, 4)}, {"grid": (2, 2)}):
        with pytest.raises(ValueError, match="images and grid go together"):
            atlas(model, ByteTokenizer(), **given)
    with pytest.raises(ValueError, match="at least 300 ordinary tokens"):
        atlas(model, ByteTokenizer(), block=100)
    with pytest.raises(ValueError, match="Sequential called no attention"):
        atlas(nn.Sequential(nn.Embedding(256, 3)), ByteTokenizer(), **SIZES)
    assert model.training is False and atlas(model.train(), ByteTokenizer(), control=False, **SIZES) and model.training


def test_own_call_and_own_tokenizer(tmp_path: Path) -> None:
    theirs = make("GPT2LMHeadModel", GPT2 | {"vocab_size": 100, "n_positions": 29})
    bert_like(0, 0).save(str(write(theirs, tmp_path / "m") / "tokenizer.json"))
    ours = load(tmp_path / "m")
    by_itself = atlas(ours, text=WORDS, **SIZES, control=False)
    called = atlas(ours, text=WORDS, **SIZES, control=False, call=lambda model, given: model(given))
    assert by_itself.to_json() == called.to_json()
    of_theirs = atlas(theirs, bert_like(0, 0), text=WORDS, **SIZES, control=False)
    for a, b in zip(by_itself.rows, of_theirs.rows, strict=True):
        assert [a[name] for name in ATLAS_COLUMNS] == pytest.approx(
            [b[name] for name in ATLAS_COLUMNS], rel=1e-3, abs=1e-4
        )


def vits() -> list[nn.Module]:
    torch.manual_seed(4)
    ours = VisionTransformer(image=(8, 12), patch=4, classes=5, d=12, heads=3, layers=2).eval()
    return [ours, make(IMAGES[1][0], VIT | {"image_size": (8, 12), "num_labels": 3})]


@pytest.mark.parametrize("which", [0, 1])
@torch.no_grad()
def test_images(which: int) -> None:
    model, pictures = vits()[which], torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1))
    found = atlas(model, images=pictures, grid=(2, 3))
    assert len(found.rows) == 6 and found.to_json() == atlas(model, images=pictures, grid=(2, 3)).to_json()
    with watch(model, Observe(keep=True)) as seen:
        model(pictures)
    for row in found.rows:
        raw = renormalised = 0.0
        for batch in range(2):
            A = seen[row["path"]].weights(row["head"], batch=batch).double()
            for i in range(6):
                for j in range(6):
                    far = math.hypot(i // 3 - j // 3, i % 3 - j % 3) / 12
                    raw += float(A[i + 1, j + 1]) * far
                    renormalised += float(A[i + 1, j + 1] / A[i + 1, 1:].sum()) * far
        assert row["distance"] == pytest.approx(raw, rel=1e-5)
        assert row["scores"]["natural"]["clean"]["distance"] == pytest.approx(renormalised, rel=1e-5)
        assert row["induction"] is None and row["previous"] is None and row["value_weighted"] is not None
        assert {"induction", "duplicate", "previous"}.isdisjoint(row["kinds"])
    json.loads(found.to_json(), parse_constant=lambda x: pytest.fail(x))


def test_a_grid_that_is_not_the_models_is_refused() -> None:
    model, pictures = vits()[0], torch.randn(1, 3, 8, 12)
    with pytest.raises(ValueError, match=r"grid is \(4, 4\)"):
        atlas(model, images=pictures, grid=(4, 4))
    with pytest.raises(ValueError, match=r"Observe grid must be \(height, width\), got 6"):
        atlas(model, images=pictures, grid=6)
    with pytest.raises(ValueError, match="block must be at least 2"):
        atlas(TEXTS["ours"][0](), ByteTokenizer(), tokens=29, block=1)


def test_a_layer_that_is_called_again_reads_the_same_texts() -> None:
    """Shared weights: its calls are joined along the batch, and each entry has its own text's duplicates."""
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=1, vocab=256).eval()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.inside(ids) + self.inside(ids)

    once, twice = (atlas(x, ByteTokenizer(), tokens=29, block=7, control=False) for x in (model, Twice()))
    assert [row["duplicate"] for row in twice.rows] == pytest.approx([row["duplicate"] for row in once.rows])


def test_a_few_tokens_are_no_sink() -> None:
    """A head that looks at all alike gives the first of a few tokens much: that is chance."""
    model = Decoder(12, heads=3, layers=1, vocab=256).eval()
    with torch.no_grad():
        for layer in model.blocks:
            layer.attention.q_proj.weight.zero_()
    found = atlas(model, ByteTokenizer(), tokens=8, block=5, control=False)
    for row in found.rows:
        assert row["kinds"]["sink"]["control"] == pytest.approx(row["sinks"]) and "sink" not in row["labels"]


@pytest.mark.parametrize("kind", ["ours", "gpt2", "t5", "vit", "theirs vit"])
def test_untrained(kind: str) -> None:
    model = vits()[kind != "vit"] if "vit" in kind else TEXTS[kind][0]()
    before, state = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    twin, again = untrained_copy(model), untrained_copy(model)
    assert torch.equal(torch.get_rng_state(), state) and type(twin) is type(model)
    assert twin.training == model.training
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])
        assert twin.state_dict()[name].shape == x.shape and twin.state_dict()[name].dtype == x.dtype
        assert torch.equal(twin.state_dict()[name], again.state_dict()[name])
        if x.ndim > 1:
            assert not torch.equal(twin.state_dict()[name], x), name
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint(p.data_ptr() for p in twin.parameters())
    assert untrained_copy(model.train()).training and not untrained_copy(model.eval()).training


# --- rollout -------------------------------------------------------------------------------------------------------


def product(seen: Any, batch: int, residual: float = 0.5, value_weighted: bool = False) -> Tensor:
    """``Π (r I + (1 − r) Ā)``, dense, the last layer on the left."""
    R = torch.eye(7, dtype=torch.float64)
    for observation in seen.values():
        maps = []
        for head in range(3):
            A = observation.weights(head, batch=batch).double()
            A = A * observation.value_norm[batch, head].double() if value_weighted else A
            maps.append(A / A.sum(-1, keepdim=True))
        R = (residual * torch.eye(7) + (1 - residual) * torch.stack(maps).mean(0)) @ R
    return R


@pytest.mark.parametrize("cells", [2**22, 8])
@pytest.mark.parametrize("options", [{}, {"sinks": True}])
@torch.no_grad()
def test_rollout(cells: int, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["regard.interp._rollout"], "CELLS", cells)
    for model in (decoder(**options), Three(options)):
        with watch(model, Observe(keep=True), values=True) as seen:
            model(ids())
        for batch in (0, 2):
            for value_weighted in (False, True):
                R = product(seen, batch, value_weighted=value_weighted)
                assert torch.allclose(rollout(seen, None, batch=batch, value_weighted=value_weighted), R, atol=1e-6)
            assert torch.allclose(rollout(seen, batch=batch), product(seen, batch)[-1:], atol=1e-6)
            some = rollout(seen, [3, -2, 0], batch=batch, residual=0.3)
            assert torch.allclose(some, product(seen, batch, 0.3)[[3, 5, 0]], atol=1e-6)
            assert torch.allclose(some.sum(-1), torch.ones(3).double())
        assert torch.equal(rollout(seen, None, residual=1), torch.eye(7).double())
        first = list(seen)[:1]
        half = rollout(seen, None, layers=first)
        assert torch.allclose(half, product({x: seen[x] for x in first}, 0), atol=1e-6)


class Three(nn.Module):
    """An encoder over token ids, three layers deep."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = Encoder(12, heads=3, layers=3, vocab=37, **options).eval()

    def forward(self, given: Tensor) -> Tensor:
        return self.encoder(given)


@torch.no_grad()
def test_rollout_refusals() -> None:
    model = decoder()
    with watch(model) as empty:
        pass
    with pytest.raises(ValueError, match="recording is empty"):
        rollout(empty)
    with watch(model, Observe(keep=True)) as seen:
        model(ids())
    for residual in (-0.1, 1.1):
        with pytest.raises(ValueError, match="residual"):
            rollout(seen, residual=residual)
    with pytest.raises(ValueError, match="values=True"):
        rollout(seen, value_weighted=True)
    with pytest.raises(ValueError, match="batch is 3"):
        rollout(seen, batch=3)
    with pytest.raises(ValueError, match="rows"):
        rollout(seen, 7)
    both = EncoderDecoder(12, heads=3, layers=1, vocab=37).eval()
    for length in (5, 7):  # a target as long as its source is another text all the same
        with watch(both, Observe(keep=True)) as seen:
            both(ids(), ids(3, length))
        with pytest.raises(ValueError, match=r"decoder\.blocks\.0\.(cross|attention)|encoder"):
            rollout(seen)
        assert rollout(seen, layers=["encoder.blocks.0.attention"]).shape == (1, 7)
        with pytest.raises(ValueError, match=r"decoder\.blocks\.0\.cross"):
            rollout(seen, layers=["decoder.blocks.0.attention", "decoder.blocks.0.cross"])
    with watch(model) as seen:
        model(ids())
    with pytest.raises(ValueError, match=r"Observe\(keep=True\)"):
        rollout(seen)


@torch.no_grad()
def test_rows_that_see_nothing_keep_what_they_have() -> None:
    model = Encoder(12, heads=3, layers=2).eval()
    with watch(model, Observe(keep=True)) as seen:
        model(torch.randn(2, 7, 12), mask=Padding([7, 0]))
    assert torch.equal(rollout(seen, None, batch=1), torch.eye(7).double())
