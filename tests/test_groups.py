"""Groups of keys: the weight on each group is a sum of exact weights, in every kernel and wherever groups go."""

from __future__ import annotations

import math

import pytest
import torch
from support import dense_attention
from support.cases import CHOICES, build
from support.key_groups import GROUPS, weights_on_groups
from torch import Tensor
from torch.utils import _pytree as pytree

import regard
from regard import Causal, Groups, Observe, Padding, RegardError
from regard.kernels import native

needs_native = pytest.mark.skipif(not native.built(), reason="the native module was not built")
BACKENDS = ["reference", pytest.param("native", marks=needs_native)]
DEFAULTS = {name: values[0] for name, values in CHOICES.items()} | {"heads": "grouped", "batch": "two"}
RUNS = Groups({"system": slice(0, 3), "user": range(3, 6), "assistant": [7, 8, 9]})


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# --- the value --------------------------------------------------------------------------------------------------------


def test_selections_become_labels() -> None:
    groups = Groups({"a": 2, "b": [0, -1], "c": slice(3, -1), "d": range(1, 2)}, length=7)
    assert groups.labels.tolist() == [1, 3, 0, 2, 2, 2, 1]
    assert groups.names == ("a", "b", "c", "d") and len(groups) == 4
    assert groups.sizes().tolist() == [1, 2, 3, 1] and groups.index("c") == 2
    # Without a length, the last named key is the last one.
    assert Groups({"a": [4], "empty": []}).labels.tolist() == [-1, -1, -1, -1, 0]


def test_masks_may_differ_within_a_batch() -> None:
    mask = torch.tensor([[True, False, False], [False, True, True]])
    groups = Groups(
        {"a": mask, "b": torch.tensor([False, False, False]), "c": ~mask & torch.tensor([True, True, False])}
    )
    assert groups.labels.tolist() == [[0, 2, -1], [2, 0, 0]]
    assert groups.sizes().tolist() == [[1, 0, 1], [2, 0, 1]]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Groups({"a": [0, 1], "b": slice(1, 3)}), "'a' and 'b'"),
        (lambda: Groups({"a": slice(1, None)}), "length"),
        (lambda: Groups({"a": [-1]}), "length"),
        (lambda: Groups({"a": [3]}, length=3), "'a'"),
        (lambda: Groups({"a": [-4]}, length=3), "'a'"),
        (lambda: Groups({"a": 0.5}), "'a'"),
        (lambda: Groups({"a": torch.ones(2, 3, 4, dtype=torch.bool)}), "'a'"),
        (lambda: Groups({"a": torch.ones(3, dtype=torch.bool)}, length=4), "'a'"),
        (lambda: Groups({"a": torch.ones(2, 3, dtype=torch.bool), "b": torch.ones(3, 3, dtype=torch.bool)}), "batch"),
        (lambda: Groups({}), "between 1 and 256"),
        (lambda: Groups({"a": [0]}, names=["a"]), "names"),
        (lambda: Groups([0], length=1), "length"),
        (lambda: Groups([0, 1], names=["a"]), "less than 1"),
        (lambda: Groups([0, 1], names=["a", "a"]), "'a' twice"),
        (lambda: Groups([0], names="a"), "names"),
        (lambda: Groups([0], names=[""]), "names"),
        (lambda: Groups([-2]), "−1"),
        (lambda: Groups([-1]), "largest number"),
        (lambda: Groups([10**12]), "largest number"),
        (lambda: Groups([0.5]), "integers"),
        (lambda: Groups(torch.ones(3, dtype=torch.bool)), "mapping"),
        (lambda: Groups(torch.zeros(1, 2, 3, dtype=torch.int64)), "shape"),
        (lambda: Groups(torch.arange(257)), "largest number"),
        (lambda: RUNS.index("nobody"), "nobody"),
        (lambda: Observe(groups=[0, 1]), "groups"),
    ],
)
def test_what_is_no_group_is_refused(make, named: str) -> None:
    with pytest.raises((RegardError, TypeError), match=named):
        make()


def test_groups_are_values() -> None:
    labels = torch.tensor([0, 0, 1])
    groups = Groups(labels, names=("a", "b"))
    labels[0] = 1  # the groups have labels of their own
    same = Groups({"a": [0, 1], "b": [2]})
    assert groups == same and hash(groups) == hash(same)
    assert groups != Groups([0, 0, 1], names=("a", "c")) and groups != Groups([0, 1, 1], names=("a", "b"))
    assert Observe(groups=groups) == Observe(groups=same) != Observe() and groups != 3
    assert repr(groups) == "Groups(a: 2 keys, b: 1 keys)"
    assert groups.for_keys(2).tolist() == [0, 0] and groups.for_keys(4).tolist() == [0, 0, 1, -1]
    leaves, tree = pytree.tree_flatten(Observe(map=3, groups=groups))
    assert len(leaves) == 1 and pytree.tree_unflatten(leaves, tree) == Observe(map=3, groups=groups)
    assert Groups(torch.tensor([2, 0])).names == ("0", "1", "2")


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", CHOICES)
def test_weights_on_groups_are_sums_of_weights(backend: str, option: str) -> None:
    """For every choice of every option. Groups, the other keys and a learned sink share the whole weight of a row."""
    for value in CHOICES[option]:
        case = build(DEFAULTS | {option: value}, n=7, m=13, d=3, e=5, seed=1)
        options = case.options | {"dropout": 0.0}
        q, k, v = (x.double() if backend == "reference" else x.float() for x in (case.q, case.k, case.v))
        if options["scale"] == math.inf:
            q, k = dense_attention.on_grid(q), dense_attention.on_grid(k)
        A = dense_attention.attention(q.double(), k.double(), v.double(), **options)[1]
        B, _, _, m = A.shape
        generator = torch.Generator().manual_seed(3)
        labels = torch.randint(-1, 3, (B, m), generator=generator)
        bound = 1e-11 if backend == "reference" else 2e-4 if option == "values" else 1e-5
        for groups in (Groups(labels, names=("a", "b", "c")), *GROUPS):
            torch.manual_seed(0)
            out, observation = regard.attention(
                q,
                k,
                v,
                **(options | {"dropout": case.options["dropout"]}),
                observe=Observe(groups=groups),
                backend=backend,
            )
            torch.manual_seed(0)
            without = regard.attention(q, k, v, **(options | {"dropout": case.options["dropout"]}), backend=backend)
            assert torch.equal(out, without), value
            got = observation.groups.double()
            assert torch.allclose(got, weights_on_groups(A, groups), rtol=0, atol=bound), (value, groups)
            all_labels = groups.for_keys(m).expand(B, m) if groups.labels.ndim == 1 else groups.for_keys(m)
            rest = (A * (all_labels < 0)[:, None, None]).sum(-1)
            sink = 0.0
            if options.get("sinks") is not None:
                sink = torch.exp(options["sinks"].view(1, -1, 1) - observation.lse.double())
            sees = observation.visible > 0
            assert torch.allclose((got.sum(-1) + rest + sink)[sees], torch.ones(()).double(), rtol=0, atol=3 * bound), (
                value
            )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_logit(backend: str) -> None:
    """It is that of a key: with its bias, without the learned sink, and −inf where no key is visible."""
    q, k, v = draw((2, 4, 7, 8), (2, 2, 11, 8), (2, 2, 11, 8))
    bias = draw((1, 4, 7, 11))[0]
    sinks = torch.full((4,), 9.0)
    options = {"bias": bias, "sinks": sinks, "mask": Causal(offset=-2), "softcap": 2.0}
    _, observation = regard.attention(q, k, v, **options, observe=Observe(), backend=backend)
    s = dense_attention.attention(
        *(x.double() for x in (q, k, v)), **(options | {"bias": bias.double(), "sinks": sinks.double()})
    )[3]
    assert torch.allclose(observation.logit_max.double(), s.amax(-1), atol=1e-5)
    assert (observation.logit_max[:, :, :2] == -math.inf).all()
    there = observation.visible > 0
    assert torch.allclose((observation.logit_max - observation.lse).exp()[there], observation.peak[there], rtol=1e-5)


@needs_native
@pytest.mark.parametrize("name", native.instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_instruction_sets_agree(full_tiles: None, name: str, dtype: torch.dtype) -> None:
    """Also with several blocks of keys, with few queries and split keys, and with as many groups as there may be."""
    many = Groups(torch.arange(2500) * 7 % 256, names=[str(number) for number in range(256)])
    for n, m, groups in ((70, 150, GROUPS[1]), (1, 2500, many), (5, 2500, GROUPS[0]), (40, 130, many)):
        q, k, v = draw((1, 4, n, 24), (1, 2, m, 24), (1, 2, m, 24), dtype=dtype)
        observe = Observe(map=3, groups=groups)
        with native.use_instruction_set(name):
            _, ours = regard.attention(q, k, v, mask=Causal(), observe=observe, backend="native")
        exact = (q.double(), k.double(), v.double())
        _, theirs = regard.attention(*exact, mask=Causal(), observe=observe, backend="reference")
        assert torch.allclose(ours.groups.double(), theirs.groups, atol=1e-5)
        assert torch.allclose(ours.logit_max.double(), theirs.logit_max, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_do_not_depend_on_threads(full_tiles: None, backend: str) -> None:
    q, k, v = draw((1, 4, 9, 16), (1, 2, 2300, 16), (1, 2, 2300, 16))
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(regard.attention(q, k, v, observe=Observe(groups=GROUPS[0]), backend=backend)[1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0].groups, results[1].groups)
    assert torch.equal(results[0].logit_max, results[1].logit_max)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hidden_nan_has_no_effect_and_a_visible_one_has(backend: str) -> None:
    q, k, v = draw((1, 2, 6, 4), (1, 2, 9, 4), (1, 2, 9, 4))
    clean = regard.attention(q, k, v, mask=Padding([8]), observe=Observe(groups=RUNS), backend=backend)[1]
    k[:, :, 8] = math.nan
    v[:, :, 8] = math.inf
    spoiled = regard.attention(q, k, v, mask=Padding([8]), observe=Observe(groups=RUNS), backend=backend)[1]
    assert torch.allclose(spoiled.groups, clean.groups, atol=1e-6)
    assert torch.allclose(spoiled.logit_max, clean.logit_max, atol=1e-6)
    visible = regard.attention(q, k, k, observe=Observe(groups=RUNS), backend=backend)[1]
    assert visible.groups.isnan().all() and visible.logit_max.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_of_a_batch(backend: str) -> None:
    """One row of labels serves all entries, and a batch has one row per entry."""
    q, k = draw((3, 2, 4, 8), (3, 2, 6, 8))
    labels = torch.tensor([[0, 0, 1, 1, -1, -1], [1, 1, 1, 0, 0, 0], [-1, 0, 1, 0, 1, 0]])
    names = ("a", "b")

    def observe(groups: Groups, entry: slice = slice(None)) -> Tensor:
        x = q[entry], k[entry], k[entry]
        return regard.attention(*x, observe=Observe(groups=groups), backend=backend)[1].groups

    together = observe(Groups(labels, names))
    for entry in range(3):
        alone = observe(Groups(labels[entry], names), slice(entry, entry + 1))
        assert torch.allclose(together[entry], alone[0], atol=1e-6)
    assert torch.equal(observe(Groups(labels[0], names)), observe(Groups(labels[:1], names)))
    with pytest.raises(RegardError, match="batch entries"):
        observe(Groups(labels[:2], names))
    # The batch dimensions of q, k and v are joined.
    nested = (q.reshape(3, 1, 2, 4, 8), k.reshape(3, 1, 2, 6, 8), k.reshape(3, 1, 2, 6, 8))
    got = regard.attention(*nested, observe=Observe(groups=Groups(labels, names)), backend=backend)[1].groups
    assert torch.equal(got, together)


def test_some_heads() -> None:
    q, k = draw((2, 6, 7, 4), (2, 2, 9, 4))
    for dropout in (0.0, 0.4):
        _, whole = regard.attention(q, k, k, observe=Observe(groups=RUNS), dropout=dropout)
        _, some = regard.attention(q, k, k, observe=Observe(groups=RUNS, heads=(4, 1)), dropout=dropout)
        assert torch.allclose(some.groups, whole.groups[:, [4, 1]], atol=1e-6)


def test_without_keys_or_queries() -> None:
    for n, m in ((0, 5), (3, 0)):
        q, k = draw((1, 2, n, 4), (1, 2, m, 4))
        for backend in ("reference", "auto"):
            _, observation = regard.attention(q, k, k, observe=Observe(groups=RUNS), backend=backend)
            assert observation.groups.shape == (1, 2, n, 3) and (observation.groups == 0).all()
            assert (observation.logit_max == -math.inf).all()


def test_compiled_calls_measure_groups() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, groups: regard.attention(q, q, q, mask=Causal(), observe=Observe(map=2, groups=groups)),
        fullgraph=True,
        backend="aot_eager",
    )
    q = torch.randn(2, 1, 9, 3, dtype=torch.float64)
    for groups in (RUNS, Groups(torch.tensor([0, 1, 1, 0]), names=("a", "b"))):
        out, observation = compiled(q, groups)
        expected, plain = regard.attention(q, q, q, mask=Causal(), observe=Observe(map=2, groups=groups))
        assert torch.allclose(out, expected) and torch.allclose(observation.groups, plain.groups)
        assert observation.observe.groups == groups


# --- means ------------------------------------------------------------------------------------------------------------


def test_means_and_the_map_from_group_to_group() -> None:
    q, k = draw((2, 3, 10, 4), (2, 3, 10, 4))
    lengths = [10, 5]
    _, observation = regard.attention(q, k, k, mask=Causal() & Padding(lengths), observe=Observe(groups=RUNS))
    values = observation.groups.double()
    rows = [values[0], values[1, :, :5]]  # the rows that count
    assert torch.allclose(observation.mean("groups"), torch.cat(rows, 1).mean(1))
    labels = RUNS.for_keys(10)
    found = observation.group_map()
    assert found.shape == (3, 3, 3)
    for a in range(3):
        chosen = torch.cat([values[0][:, labels == a], values[1, :, :5][:, labels[:5] == a]], 1)
        assert torch.allclose(found[:, a], chosen.mean(1))
    # Rows of a group without counted queries are unknown.
    _, padded = regard.attention(q, k, k, mask=Padding([3, 3]), observe=Observe(groups=RUNS))
    assert padded.group_map()[:, 1:].isnan().all() and not padded.group_map()[:, 0].isnan().any()


def test_queries_are_aligned_with_keys() -> None:
    """Query i has the group of key i + offset; other queries can be given groups of their own."""
    q, k = draw((1, 2, 4, 4), (1, 2, 9, 4))
    _, observation = regard.attention(q, k, k, observe=Observe(groups=RUNS))
    values = observation.groups[0].double()
    found = observation.group_map()  # the queries are keys 5 … 8: one of "user", two of "assistant"
    assert found[:, 0].isnan().all()
    assert torch.allclose(found[:, 1], values[:, 0]) and torch.allclose(found[:, 2], values[:, 2:].mean(1))
    _, top_left = regard.attention(q, k, k, observe=Observe(groups=RUNS, offset=0))
    assert torch.allclose(top_left.group_map()[:, 0], values[:, :3].mean(1))
    own = observation.group_map(Groups([0, 0, 1, -1], names=("x", "y")))
    assert own.shape == (2, 2, 3)
    assert torch.allclose(own[:, 0], values[:, :2].mean(1)) and torch.allclose(own[:, 1], values[:, 2])
    with pytest.raises(RegardError, match="groups"):
        regard.attention(q, k, k, observe=Observe())[1].group_map()


def test_observations_merge() -> None:
    q, k = draw((3, 2, 9, 4), (3, 2, 9, 4))
    other = Groups({"system": [0], "user": slice(1, 8), "assistant": []})

    def observe(entries: slice, groups: Groups) -> regard.Observation:
        return regard.attention(q[entries], k[entries], k[entries], mask=Causal(), observe=Observe(groups=groups))[1]

    whole = observe(slice(None), RUNS)
    parts = observe(slice(0, 1), RUNS).merge(observe(slice(1, 3), RUNS))
    assert torch.allclose(parts.groups, whole.groups, atol=1e-6) and parts.observe == whole.observe
    assert torch.allclose(parts.group_map(), whole.group_map())

    # Each text may have keys of its own in the groups.
    first, second = observe(slice(0, 1), RUNS), observe(slice(1, 3), other)
    mixed = first.merge(second)
    labels = torch.stack([RUNS.for_keys(9), other.for_keys(9), other.for_keys(9)])
    together = observe(slice(None), Groups(labels, RUNS.names))
    assert torch.equal(mixed.observe.groups.for_keys(9), labels)
    assert torch.allclose(mixed.group_map(), together.group_map())
    assert torch.allclose(mixed.merge(whole).groups[:3], mixed.groups)

    short = regard.attention(q[..., :5, :], k[..., :5, :], k[..., :5, :], observe=Observe(groups=RUNS))[1]
    assert whole.merge(short).groups is None
    with pytest.raises(RegardError, match="groups"):
        whole.merge(short).group_map()
    with pytest.raises(RegardError, match="same Observe options"):
        whole.merge(observe(slice(0, 1), Groups([0, 1, 2], names=("a", "b", "c"))))
