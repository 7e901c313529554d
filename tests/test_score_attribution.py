"""Score attribution: pairs of parts sum to the score that a layer computes, and each pair is right."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import pytest
import torch
from support.attribution_models import OwnModel, family, token_ids
from support.checkpoints import make, perturb
from support.model_configs import BERT, V

import regard
from regard import ALiBi, Observe, RelativeTable, Rotary
from regard._errors import RegardError
from regard._saved_call import SavedCall
from regard.interp import Component, ScoreParts, score_attribution
from regard.kernels.score_tiles import score_tile
from regard.nn import Decoder, RMSNorm

pytestmark = pytest.mark.usefixtures("full_tiles")


def logit(recording: regard.interp.Recording, path: str, head: int, row: int, key: int) -> float:
    """The logit of a recorded call."""
    call = recording[path].saved_calls[0]
    assert isinstance(call, SavedCall)
    tile = score_tile(call.select_head(0, head), torch.tensor([row]), torch.tensor([key]))
    return float(tile.logits.reshape(-1)[0])


def check(parts: ScoreParts, expected: float) -> None:
    largest = float(parts.values.abs().max())
    assert parts.sum() == pytest.approx(parts.score, abs=1e-4 * max(abs(parts.score), largest))
    score = parts.score
    if parts.softcap is not None:
        score = parts.softcap * math.tanh((parts.score - parts.bias) / parts.softcap) + parts.bias
    assert score == pytest.approx(expected, abs=1e-4)


FAMILIES = ["bart", "bloom", "falcon with alibi", "gemma2", "gpt2", "gpt_neox", "gptj", "llama", "olmo2"]
FAMILIES += ["opt with post-norm and projections", "phi", "qwen3", "t5"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pairs_sum_to_the_score(name: str) -> None:
    model, inputs = family(name)
    with torch.no_grad(), regard.watch(model, Observe(keep=True)) as recording:
        output = inputs() if callable(inputs) else model(inputs)
    path = list(recording)[-1]
    parts = score_attribution(model, inputs, path, 1, -1, 4)
    row = output.logits.shape[1] - 1
    assert (parts.row, parts.key, parts.layer) == (row, 4, path)
    check(parts, logit(recording, path, 1, row, 4))
    assert (parts.softcap is not None) == (name == "gemma2")
    assert (parts.bias != 0) == (name in ("bloom", "falcon with alibi"))
    heads = {part.path for part in parts.queries if part.kind == "head"}
    assert heads and path not in heads  # earlier layers only
    assert {part.kind for part in parts.queries} >= {"token embedding", "feed-forward", "head"}


OURS: dict[str, dict[str, Any]] = {
    "rotary": {"position": Rotary(4), "kv_heads": 1, "qkv_bias": True},
    "alibi": {"position": ALiBi(slopes=[0.5, 0.25, 0.125]), "order": "post"},
    "a table": {"position": RelativeTable(3, 4), "softcap": 2.0, "norm": RMSNorm, "scale": 0.7},
}


@pytest.mark.parametrize("name", OURS)
def test_models_of_regard(name: str) -> None:
    torch.manual_seed(0)
    model = perturb(Decoder(12, 3, 2, vocab=V, hidden=20, **OURS[name])).eval()
    ids = token_ids(7)
    with torch.no_grad(), regard.watch(model, Observe(keep=True)) as recording:
        model(ids)
    with torch.no_grad():
        parts = score_attribution(model, ids, 1, 2, 5, 2)
    check(parts, logit(recording, "blocks.1.attention", 2, 5, 2))
    assert (parts.bias != 0) == (name != "rotary")
    assert (parts.softcap == 2.0) == (name == "a table")


def test_an_encoder_without_logits_and_keys_after_the_query() -> None:
    model = make("BertModel", BERT)
    ids = token_ids(7)
    with torch.no_grad(), regard.watch(model, Observe(keep=True)) as recording:
        model(ids)
    path = list(recording)[1]
    check(score_attribution(model, ids, 1, 0, 2, 6), logit(recording, path, 0, 2, 6))


def test_the_pairs_of_the_first_layer_by_hand() -> None:
    model, ids = family("gpt2")
    parts = score_attribution(model, ids, 0, 1, 5, 3)
    transformer = model.transformer
    norm = transformer.h[0].ln_1
    weight = transformer.h[0].attn.c_attn.weight.detach().double()
    W_q, W_k = weight[:, 4:8], weight[:, 16:20]

    def through_norm(x: torch.Tensor, row: int) -> torch.Tensor:
        whole = (transformer.wte.weight[ids[0, row]] + transformer.wpe.weight[row]).detach().double()
        scale = ((whole - whole.mean()).square().mean() + norm.eps).rsqrt()
        return norm.weight.detach().double() * (x - x.mean()) * scale

    token = transformer.wte.weight[ids[0, 5]].detach().double()
    position = transformer.wpe.weight[3].detach().double()
    expected = float((through_norm(token, 5) @ W_q) @ (through_norm(position, 3) @ W_k)) / 2  # √4
    query = parts.queries.index(Component("token embedding", "transformer.wte", None))
    key = parts.keys.index(Component("position embedding", "transformer.wpe", None))
    assert float(parts.values[query, key]) == pytest.approx(expected, abs=1e-5)
    # Tokens, positions, the bias of the norm, and the bias of the projection.
    assert len(parts.queries) == len(parts.keys) == 4


def test_in_a_trained_model_induction_reads_the_previous_token_head() -> None:
    model = regard.models.load(regard.models.bundled())
    ids = torch.tensor(model.tokenizer.encode("import os; import o"))
    parts = score_attribution(model, ids, 2, 2, -1, 2)
    keys = parts.of_key()
    best = max(keys, key=lambda part: keys[part])
    assert (best.path, best.head) == ("decoder.blocks.1.attention", 0)
    assert sum(keys.values()) == pytest.approx(sum(parts.of_query().values()))


def test_refusals() -> None:
    torch.manual_seed(0)
    model = Decoder(12, 3, 2, vocab=V)
    ids = token_ids(5)
    with pytest.raises(RegardError, match="hidden"):
        score_attribution(model, ids, 0, 0, 1, 3)
    for arguments in ((5, 0, 1, 0), ("blocks.7", 0, 1, 0), (0, 3, 1, 0), (0, 0, 5, 0), (0, 0, 1, 9)):
        with pytest.raises(RegardError, match=r"layer|head|row|key"):
            score_attribution(model, ids, *arguments)
    with pytest.raises(RegardError, match="scale=inf"):
        score_attribution(Decoder(12, 3, 1, vocab=V, scale=math.inf), ids, 0, 0, 1, 0)
    xlnet = make("XLNetLMHeadModel", {"vocab_size": V, "d_model": 12, "n_layer": 1, "n_head": 3, "d_inner": 20})
    with pytest.raises(RegardError, match="by hand"):
        score_attribution(xlnet, ids, 0, 0, 1, 0)
    with pytest.raises(RegardError, match=r"query of blocks\.0\.attention"):
        score_attribution(OwnModel("layer").eval(), ids, 0, 0, 1, 0)


def test_tables_and_csv(tmp_path: Any) -> None:
    model, ids = family("bloom")
    parts = score_attribution(model, ids, 1, 1, 5, 2)
    pairs = parts.pairs()
    assert math.fsum(pair.value for pair in pairs) == pytest.approx(parts.sum())
    sizes = [abs(pair.value) for pair in parts.top(6)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(pair.query is None for pair in pairs) == 1  # the position bias
    assert parts.table(4).row_count == 5
    rows = list(csv.DictReader(io.StringIO(parts.to_csv(tmp_path / "pairs.csv"))))
    assert len(rows) == len(pairs) and (tmp_path / "pairs.csv").exists()
    assert math.fsum(float(row["value"]) for row in rows) == pytest.approx(parts.sum())
