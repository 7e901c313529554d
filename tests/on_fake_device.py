"""What runs on a device that is not a CPU: these tests need a process in which the fake device is registered.

``test_devices.py`` runs this file in such a process, because its name hides it from pytest. By hand:
``.venv/bin/python -m pytest tests/on_fake_device.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fake_device
from support.cases import build, pairs
from support.checkpoints import make
from support.model_configs import GPT2, ids
from support.observed_models import ASK, CASES, outputs
from support.operator_runs import check_in_float32
from support.recorder_worker import model as decoder
from support.recorder_worker import probes
from torch import Tensor, nn

import regard
from regard import Causal, Observe, Padding, Prefix, Segments, Window, _devices, attention, bench, watch
from regard.bench import _observation_cases as watching
from regard.bench import _operator_cases as operator
from regard.doctor import device_test
from regard.interp import _records as records
from regard.interp import ablate, atlas, load_recording, look
from regard.interp._rollout import rollout
from regard.kernels import ops, score_tiles
from regard.nn import Encoder, MultiHeadAttention
from regard.training._recorder import Recorder

fake_device.register()
DEVICE = torch.device(fake_device.NAME, 0)
# Differences between float32 and float64 of values that are at most about 10.
BOUND = 2e-5


BOTH = pytest.mark.parametrize("_device", [True, False], indirect=True, ids=["float64", "no float64"])


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fake device, without float64 unless the test asks for both. Calls take the way they take on a real device."""
    known = _devices.has_float64
    with_float64 = getattr(request, "param", False)
    monkeypatch.setattr(_devices, "has_float64", lambda x: with_float64 if x.type == fake_device.NAME else known(x))
    monkeypatch.setattr(fake_device.FakeDevice, "float64", with_float64)
    monkeypatch.setattr(fake_device.FakeDevice, "transfers", 0)
    # Tensors of a real device are ordinary ones, and no mode is active.
    monkeypatch.setattr(ops, "can_skip_dispatcher", lambda *tensors: True)
    monkeypatch.setattr(score_tiles, "DEVICE_TILE_ELEMENTS", 2**12)
    monkeypatch.setattr(score_tiles, "HEAD_ELEMENTS", 12)
    torch.manual_seed(0)
    # A backward pass would run in a thread of the device, and device guards in Python crash there.
    with fake_device.FakeDevice(), torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 12 elements on the device too."""
    monkeypatch.setattr(score_tiles, "DEVICE_TILE_ELEMENTS", 12)


def same(ours: Any, expected: Any, bound: float = BOUND) -> None:
    """Equal up to rounding of float32, with NaN and inf at the same places; integers are equal."""
    ours = ours.detach().cpu()
    expected = expected.detach().cpu()
    assert ours.shape == expected.shape
    if not expected.is_floating_point():
        assert torch.equal(ours, expected)
        return
    torch.testing.assert_close(ours.double(), expected.double(), atol=bound, rtol=bound, equal_nan=True)


def same_observation(ours: regard.Observation, expected: regard.Observation) -> None:
    compared = 0
    for name, value in vars(expected).items():
        if isinstance(value, Tensor):
            assert getattr(ours, name).device == DEVICE
            same(getattr(ours, name), value)
            compared += 1
    assert compared > 3


def to_device(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: to_device(value) for name, value in x.items()}
    return x.to(DEVICE) if isinstance(x, Tensor) else x


# --- the emulation itself --------------------------------------------------------------------------------------------


@BOTH
def test_the_fake_device_refuses_what_a_real_one_refuses() -> None:
    x = torch.randn(3, device=DEVICE)
    with pytest.raises(TypeError, match="NumPy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="on the CPU"):
        x + torch.ones(3)
    assert x.device == DEVICE and not x.is_cpu
    before = fake_device.FakeDevice.transfers
    float(x.sum())
    assert fake_device.FakeDevice.transfers == before + 1
    if fake_device.FakeDevice.float64:
        x.double()
        return
    for convert in (lambda: x.double(), lambda: torch.zeros(2, dtype=torch.float64).to(DEVICE)):
        with pytest.raises(RuntimeError, match="float64"):
            convert()
    with pytest.raises(RuntimeError, match="float64"):
        x.to("cpu", torch.float64)


# --- the operator ----------------------------------------------------------------------------------------------------


def on_device(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The operator on the device; masks, biases and sinks come from the CPU, as users often make them."""
    return attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), **options).cpu()


@pytest.mark.parametrize(("part", "_device"), [(0, True), (1, False), (2, False)], indirect=["_device"])
@pytest.mark.usefixtures("tiny_tiles")
def test_every_option_forward_and_backward(part: int) -> None:
    choices = list(pairs())[part::96]
    for seed, choice in enumerate(choices):
        if choice["scale"] == "hard" or choice["values"] == "large":
            # The largest of several products is decided by rounding; ties have a test of their own.
            choice = choice | {"values": "ties"}
        check_in_float32(build(choice, 7, 11, 3, 5, seed), on_device)


@pytest.mark.parametrize("_device", [True], indirect=True)
def test_a_bias_that_overflows_float32_hides_no_key() -> None:
    low = torch.finfo(torch.float64).min
    bias = torch.tensor([[0, low], [low, low], [low, -torch.inf]], dtype=torch.float64).to(DEVICE)
    x = torch.ones(1, 1, 2, 2)
    out = on_device(torch.ones(1, 1, 3, 2), x, torch.eye(2)[None, None], bias=bias)
    assert torch.equal(out[0, 0], torch.tensor([[1, 0], [0.5, 0.5], [1, 0]]))


@BOTH
def test_the_operator_of_torch_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q = torch.randn(2, 2, 5, 3, device=DEVICE, requires_grad=True)
    out, observation = attention(q, q, q, mask=Causal(), observe=Observe(map=2), backend="reference")
    out.sum().backward()
    assert out.device == observation.map.device == q.grad.device == DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_nan_stays_hidden(dtype: torch.dtype) -> None:
    v = torch.randn(1, 1, 5, 3, dtype=dtype)
    v[..., -1, :] = torch.nan
    q = torch.randn(1, 1, 5, 3, dtype=dtype)
    out = on_device(q, q, v, mask=Padding([4]))
    assert out.isfinite().all()
    same(out, attention(q, q, v, mask=Padding([4])), 0.05)


@pytest.mark.parametrize("gradients", [False, True])
def test_the_cpu_does_not_wait_at_every_tile(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = regard.RelativeTable(2, 3)
    options = {"mask": Causal() & Window(4), "bias": bias, "sinks": torch.zeros(2)}
    counts = []
    for elements in (12, 2**18):
        monkeypatch.setattr(score_tiles, "DEVICE_TILE_ELEMENTS", elements)
        monkeypatch.setattr(score_tiles, "HEAD_ELEMENTS", elements)
        q = torch.randn(2, 2, 17, 3, device=DEVICE, requires_grad=gradients)
        before = fake_device.FakeDevice.transfers
        observe = None if gradients else Observe(map=4, profile=3, key_mass=True, top=2)
        result = attention(q, q, q, **options, dropout=0.1, observe=observe)
        if gradients:
            result.sum().backward()
        counts.append(fake_device.FakeDevice.transfers - before)
    assert counts[0] == counts[1] < 15


# --- observables -----------------------------------------------------------------------------------------------------

OBSERVED = {
    "everything": ({}, Observe(map=4, profile=3, key_mass=True, top=3, sink=2, local=2)),
    "grid": ({}, Observe(map=3, profile=(1, 2), grid=(2, 3), local=1)),
    "padding": ({"mask": Causal() & Padding([3, 7])}, Observe(map=4, profile=2, key_mass=True)),
    "sinks": ({"sinks": torch.tensor([0.3, -0.1])}, Observe(top=2, queries=[7, 2])),
    "some heads": ({"mask": Window(2)}, Observe(map=4, heads=(1,))),
    "hard": ({"scale": torch.inf}, Observe(map=4, top=2)),
}


@BOTH
@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("name", OBSERVED)
def test_observables(name: str) -> None:
    options, observe = OBSERVED[name]
    q, k, v = (torch.randn(2, heads, 7, 5) for heads in (2, 1, 1))
    ours = attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), **options, observe=observe)[1]
    expected = attention(q, k, v, **options, observe=observe, backend="reference")[1]
    same_observation(ours, expected)
    for value in ("entropy", "distance"):
        same(ours.mean(value), expected.mean(value))


@BOTH
@pytest.mark.usefixtures("tiny_tiles")
def test_exact_weights_tiles_and_merging() -> None:
    q = torch.randn(2, 2, 9, 5)
    observe = Observe(map=4, profile=2, keep=True)
    options: dict[str, Any] = {"mask": Causal(), "bias": regard.ALiBi(), "observe": observe}
    ours = attention(to_device(q), to_device(q), to_device(q), **options)[1]
    expected = attention(q, q, q, **options, backend="reference")[1]
    ours = ours.merge(ours)
    expected = expected.merge(expected)
    same_observation(ours, expected)
    same(ours.weights(1, batch=3), expected.weights(1, batch=3))
    same(ours.weights(1, [0, -1], slice(2, 5)), expected.weights(1, [0, -1], slice(2, 5)))
    same(ours.visible_keys(0, range(3)), expected.visible_keys(0, range(3)))
    for rows, keys in ((None, None), (slice(2, 8), slice(1, 9)), ([0, 3, 8], [1, 7, 8])):
        same(ours.tile(0, rows, keys, size=3), expected.tile(0, rows, keys, size=3))


# --- masks and positions ---------------------------------------------------------------------------------------------

MASKS = {
    "causal": Causal(),
    "padding": Padding([3, 7]),
    "left padding": Padding(torch.arange(7) >= torch.tensor([[2], [0]])),
    "prefix": Causal() | Prefix([2, 4]),
    "segments": Causal() & Segments([0, 0, 1, 1, 1, 2, 2]),
    "scattered": Segments([0, 1, 0, 1, 0, 2, 2]),
    "two gaps": Window(1, 0) | Padding([2, 3]),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("where", ["cpu", DEVICE.type])
def test_masks(name: str, where: str) -> None:
    mask = torch.utils._pytree.tree_map_only(Tensor, lambda x: x.to(where), MASKS[name])
    assert mask.dense(7, 7, DEVICE).device == DEVICE
    assert torch.equal(mask.dense(7, 7, DEVICE).cpu(), MASKS[name].dense(7, 7))
    assert repr(mask) == repr(MASKS[name])
    # Two masks with tensors on different devices.
    both = mask & Padding([7, 5])
    real = both.real_queries(7, 7)
    if real is not None:
        assert torch.equal(real.cpu(), (MASKS[name] & Padding([7, 5])).real_queries(7, 7))
    x = torch.randn(2, 1, 7, 3)
    same(on_device(x, x, x, mask=both), attention(x, x, x, mask=MASKS[name] & Padding([7, 5])))


POSITIONS = {
    "alibi": regard.ALiBi(slopes=[0.5, 0.25]),
    "t5": regard.T5Buckets(2),
    "table": regard.RelativeTable(2, 3),
    "keys": regard.RelativeKeys(4, 2, heads=2),
    "grid": regard.Grid(2, 3, 2, d=4),
    "quadratic": regard.Quadratic(2, 3, 2),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_biases(name: str) -> None:
    bias = POSITIONS[name]
    q = torch.randn(2, 2, 6, 4)
    same(bias.dense(to_device(q), 6), bias.dense(q, 6))
    if isinstance(bias, nn.Module):
        moved = copy.deepcopy(bias).to(DEVICE)
        same(moved.dense(to_device(q), 6), bias.dense(q, 6))


@BOTH
@pytest.mark.parametrize("layout", ["halves", "pairs"])
@pytest.mark.parametrize("given", [False, True])
def test_rotary_is_computed_in_float64_anywhere(layout: str, given: bool) -> None:
    rotary = regard.Rotary(8, layout=layout)
    x = torch.randn(2, 2, 5, 8)
    start = 0 if given else 100_000
    position_ids = torch.arange(100_000, 100_005) if given else None
    same(rotary(to_device(x), to_device(position_ids), start), rotary(x, position_ids, start), 1e-6)


@pytest.mark.parametrize("position", [regard.Sinusoidal(8), regard.Sinusoidal(8, grid=(2, 2)), regard.Learned(9, 8)])
def test_positions_added_to_the_input(position: nn.Module) -> None:
    x = torch.randn(2, 5, 8)
    moved = copy.deepcopy(position).to(DEVICE)
    same(moved(to_device(x)), position(x), 1e-6)
    if getattr(position, "grid", None) is None:
        at = torch.tensor([3, 1, 0, 2, 8])
        same(moved(to_device(x), position_ids=to_device(at)), position(x, position_ids=at), 1e-6)


# --- layers and models -----------------------------------------------------------------------------------------------


def test_multi_head_attention() -> None:
    layer = MultiHeadAttention(12, heads=3, kv_heads=1, position=regard.Rotary(4), qkv_bias=True, sinks=True)
    moved = copy.deepcopy(layer).to(DEVICE)
    x = torch.randn(2, 7, 12)
    y, observation = moved(to_device(x), mask=Causal() & Padding([4, 7]), observe=Observe(map=3))
    expected, there = layer(x, mask=Causal() & Padding([4, 7]), observe=Observe(map=3))
    same(y, expected)
    same_observation(observation, there)
    y.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(moved.parameters(), layer.parameters(), strict=True):
        same(ours.grad, theirs.grad, 1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama padded left", "gemma2", "t5", "vit"])
def test_watching_a_model_of_transformers(name: str, tmp_path: Path) -> None:
    kind, entries, given = CASES[name]
    model = make(kind, entries)
    moved = copy.deepcopy(model).to(DEVICE)
    observe = Observe(map=ASK.map, key_mass=True, top=2, keep=True)
    with torch.no_grad(), watch(model, observe, values=True) as expected:
        plain = model(**given)
    with torch.no_grad(), watch(moved, observe, values=True) as recording:
        result = moved(**to_device(given))
    same(outputs(result), outputs(plain), 1e-4)
    assert list(recording) == list(expected)
    for path in recording:
        same_observation(recording[path], expected[path])
    assert recording.heads()[0].keys() == expected.heads()[0].keys()
    recording.save(tmp_path / "recording")
    loaded = load_recording(tmp_path / "recording")
    path = next(iter(loaded))
    assert loaded[path].entropy.is_cpu
    same(loaded[path].weights(1), expected[path].weights(1))
    if name == "gpt2":
        same(rollout(recording), rollout(expected))
        recording.to_html(tmp_path / "page.html")


@BOTH
def test_watching_torchs_own_layer() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval()
    moved = copy.deepcopy(layer).to(DEVICE)
    x = torch.randn(2, 5, 12)
    with torch.no_grad(), watch(layer, ASK) as expected:
        plain = layer(x)
    with torch.no_grad(), watch(moved, ASK) as recording:
        same(moved(to_device(x)), plain)
    same_observation(recording[0], expected[0])


@BOTH
@pytest.mark.parametrize("by", ["zero", "mean"])
def test_ablation(by: str) -> None:
    model = make("GPT2LMHeadModel", GPT2)
    moved = copy.deepcopy(model).to(DEVICE)
    # The ids stay on the CPU: a user's call is the same for every device.
    expected = ablate(model, [(0, 1)], by=by).loss_change(ids())
    change = ablate(moved, [(0, 1)], by=by).loss_change(ids())
    assert abs(change.before - expected.before) < 1e-4
    assert abs(change.after - expected.after) < 1e-4
    assert expected.change != 0


# These count at which offset the largest weight of a row lies: rounding decides between two weights that are equal.
TIED_SCORES = {"positional"}


def test_the_atlas() -> None:
    model = decoder().eval()
    moved = copy.deepcopy(model).to(DEVICE)
    generator = torch.get_rng_state()
    ours = atlas(moved, probes=probes(), stored=False)
    assert torch.equal(torch.get_rng_state(), generator)
    expected = atlas(model, probes=probes(), stored=False)
    for row, other in zip(ours.rows, expected.rows, strict=True):
        assert row.keys() == other.keys()
        for probe, by_weights in other["scores"].items():
            for weights, scores in by_weights.items():
                for name in scores.keys() - TIED_SCORES:
                    found = row["scores"][probe][weights][name]
                    assert found == pytest.approx(scores[name], abs=1e-3, nan_ok=True), name


def test_looking_and_generating() -> None:
    model = regard.models.load(regard.models.bundled())
    expected = look(model, "a b c a b c", generate=4)
    tokens = model.generate("a b c", 5)
    moved = model.to(DEVICE)
    recording = look(moved, "a b c a b c", generate=4)
    assert recording.metadata["tokens"] == expected.metadata["tokens"]
    assert moved.generate("a b c", 5) == tokens
    same_observation(recording[0], expected[0])


def test_the_recorder_and_training(tmp_path: Path) -> None:
    model = decoder()
    moved = copy.deepcopy(model).to(DEVICE)
    before = fake_device.FakeDevice.synchronized
    for name, one in (("cpu", model), ("device", moved)):
        assert Recorder(one, tmp_path / name, probes=probes(), map=6, profile=4).step(0)
    assert fake_device.FakeDevice.synchronized > before
    ours, expected = (records.read_record(records.list_records(tmp_path / name)[0]) for name in ("device", "cpu"))
    assert ours.names == expected.names
    for name, tensor in expected.tensors.items():
        columns = [i for i, column in enumerate(expected.names.get(name, ())) if not TIED_SCORES & set(column.split())]
        if columns:
            same(ours.tensors[name][:, columns], tensor[:, columns], 1e-3)
        else:
            same(ours.tensors[name], tensor, 1e-3)


def test_an_encoder_trains() -> None:
    torch.manual_seed(0)
    model = Encoder(12, heads=3, layers=1)
    moved = copy.deepcopy(model).to(DEVICE)
    x = torch.randn(2, 5, 12)
    for one, data in ((model, x), (moved, to_device(x))):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            one(data).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(moved.parameters(), model.parameters(), strict=True):
        same(ours, theirs, 1e-4)


def test_describing() -> None:
    assert "heads" in repr(MultiHeadAttention(12, heads=3).to(DEVICE))


# --- the instruments -------------------------------------------------------------------------------------------------


def test_a_benchmark_runs_there_and_waits_for_it() -> None:
    device = _devices.find_device(fake_device.NAME)
    assert device == DEVICE
    cases = [operator._forward((1, 2, 7, 5), True, torch.float16, None, device)]
    cases.append(operator._with_gradients((1, 2, 7, 5), True, None, device=device))
    for case in cases:
        before = fake_device.FakeDevice.synchronized
        measurement = bench.run(case, seconds=0)
        # Two calls, three rounds, and both ends of each.
        assert fake_device.FakeDevice.synchronized == before + 12
        assert set(measurement.best) == {"regard", "SDPA"}
    for call in watching._layer(64, device).values():
        call()
    assert bench.conditions(device)["device"] == str(DEVICE)


def test_the_doctor_compares_it_with_the_cpu(full_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_tiles, "DEVICE_TILE_ELEMENTS", 2**22)
    tested = device_test.compare_with_cpu(DEVICE)
    assert tested["problem"] == ""
    assert 0 < tested["error"] < device_test.ALLOWED
    monkeypatch.setattr(device_test, "ALLOWED", 0.0)
    assert "the output" in device_test.compare_with_cpu(DEVICE)["problem"]
    monkeypatch.setattr(device_test, "attention", lambda *args, **options: args[0] @ args[1])
    assert "Error: " in device_test.compare_with_cpu(DEVICE)["problem"]
