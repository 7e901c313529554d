"""A kernel that is wrong or does not compile is found out before ``auto`` uses it. Here it is the native kernel."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import regard
from regard import Causal
from regard.kernels import choose_backend, native, self_check, triton
from regard.kernels.triton._tile_sizes import MAX_WIDTH

pytestmark = [
    pytest.mark.skipif(not native.built(), reason="the native module was not built"),
    pytest.mark.usefixtures("full_tiles"),  # the reference is slow with tiny ones
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No verdict is known, and new ones are stored in an empty folder."""
    file = tmp_path / "new folder" / "kernel_checks.json"
    monkeypatch.setattr(self_check, "verdicts_file", lambda: file)
    monkeypatch.setattr(self_check, "_verdicts", {})
    return file


def kernel(**changes: Callable[..., Any]) -> ModuleType:
    """The native kernel with some of its functions replaced."""
    module = ModuleType("regard.kernels.toy")
    module.__file__ = native.__file__
    for name in ("forward", "observed", "backward", "bin_masses"):
        setattr(module, name, changes.get(name, getattr(native, name)))
    return module


def wrong_output(*arguments: Any) -> Any:
    result = native.forward(*arguments)
    result.out[..., -1, :] *= 1.5
    return result


def wrong_lse(*arguments: Any) -> Any:
    result = native.forward(*arguments)
    return result._replace(row_sum=result.row_sum * 1.1)


def wrong_entropy(*arguments: Any) -> Any:
    result = native.observed(*arguments)
    result[3]["entropy"] += 0.01
    return result


def wrong_map(*arguments: Any) -> Any:
    result = native.observed(*arguments)
    result[3]["map"][0, 0, 0] += 0.1
    return result


def wrong_bins(*arguments: Any) -> Any:
    return native.bin_masses(*arguments) * 1.01


def wrong_gradient(*arguments: Any) -> Any:
    result = native.backward(*arguments)
    return replace(result, k=-result.k)


def nan_gradient(*arguments: Any) -> Any:
    result = native.backward(*arguments)
    return replace(result, q=result.q * float("nan"))


def broken(*arguments: Any) -> Any:
    raise RuntimeError("no code for this device\nand a long log")


class CompilationError(Exception):
    """As the errors of Triton's compiler."""


CompilationError.__module__ = "triton.compiler.errors"


def does_not_compile(*arguments: Any) -> Any:
    raise CompilationError("no code for this device\nand a long log")


def wrong_access(*arguments: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def out_of_memory(*arguments: Any) -> Any:
    raise RuntimeError("Triton Error [CUDA]: out of memory")


def full_disk(*arguments: Any) -> Any:
    raise OSError("No space left on device")


@pytest.mark.parametrize("dtype", self_check.TOLERANCES)
def test_a_right_kernel_has_no_problem(dtype: torch.dtype) -> None:
    assert self_check.find_problem(native, CPU, dtype) == ""


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"forward": wrong_output}, "plain, forward: out differs"),
        ({"forward": wrong_lse}, "plain, forward: lse differs"),
        ({"observed": wrong_entropy}, "plain, observables: entropy differs"),
        ({"observed": wrong_map}, "plain, observables: map differs"),
        ({"bin_masses": wrong_bins}, "plain, weights on bins: the weight on a bin differs"),
        ({"backward": wrong_gradient}, "plain, gradients: dk differs"),
        ({"backward": nan_gradient}, "plain, gradients: dq differs"),
        ({"backward": broken}, "plain, gradients: RuntimeError: no code for this device"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_kernel_is_found_out(changes: dict[str, Any], where: str, dtype: torch.dtype) -> None:
    problem = self_check.find_problem(kernel(**changes), CPU, dtype)
    assert problem.startswith(where) and "\n" not in problem


def test_an_option_that_is_ignored_is_found_out() -> None:
    """Each option changes the result of some call by more than the tolerance."""
    for option, absent in (
        ("hi", None),
        ("mask", None),
        ("bias", None),
        ("softcap", 0.0),
        ("terms", ()),
        ("sinks", None),
    ):

        def without(q: Any, k: Any, v: Any, scores: Any, option: str = option, absent: Any = absent) -> Any:
            return native.forward(q, k, v, replace(scores, **{option: absent}))

        assert "out differs" in self_check.find_problem(kernel(forward=without), CPU, torch.float32), option


def test_a_verdict_is_made_once_and_stored(verdicts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = kernel(forward=does_not_compile)
    with pytest.warns(
        RuntimeWarning, match=r"toy kernels .* float32 on cpu.*no code for this device; the reference"
    ) as caught:
        assert not self_check.verdict_of(toy, CPU, torch.float32).trusted
    assert len(caught) == 1
    (stored,) = json.loads(verdicts.read_text()).values()
    assert stored == "plain, forward: CompilationError: no code for this device"

    def unexpected(*arguments: Any) -> str:
        raise AssertionError("checked again")

    monkeypatch.setattr(self_check, "find_problem", unexpected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not self_check.verdict_of(toy, CPU, torch.float32).trusted
    # Another process reads the file, and says it once too.
    self_check._verdicts.clear()
    with pytest.warns(RuntimeWarning, match="no code for this device"):
        assert not self_check.verdict_of(toy, CPU, torch.float32).trusted
    # Another dtype has its own verdict.
    with pytest.raises(AssertionError, match="checked again"):
        self_check.verdict_of(toy, CPU, torch.float16)


def test_a_repeated_check_replaces_the_verdict(verdicts: Path) -> None:
    toy = kernel(forward=broken)
    assert not self_check.check_again(toy, CPU, torch.float32).trusted
    toy.forward = native.forward  # type: ignore[attr-defined]
    assert self_check.check_again(toy, CPU, torch.float32).trusted
    assert self_check.verdict_of(toy, CPU, torch.float32).trusted
    assert list(json.loads(verdicts.read_text()).values()) == [""]


def scaled_gradients(*arguments: Any) -> Any:
    result = native.backward(*arguments)
    return replace(result, q=result.q * 0.97)


def zero_beyond_one_tile(*arguments: Any) -> Any:
    result = native.forward(*arguments)
    if arguments[1].shape[2] > 64:
        result.out[..., 130:, :] = 0
    return result


@pytest.mark.parametrize("dtype", self_check.TOLERANCES)
def test_small_errors_everywhere_and_errors_of_long_calls_are_found(dtype: torch.dtype) -> None:
    assert "dq differs" in self_check.find_problem(kernel(backward=scaled_gradients), CPU, dtype)
    assert "long, forward: out differs" in self_check.find_problem(kernel(forward=zero_beyond_one_tile), CPU, dtype)


@pytest.mark.parametrize("state", ["autocast", "default device", "default dtype"])
def test_the_state_of_the_caller_does_not_matter(state: str) -> None:
    """A first call under autocast, for example, must not count as an error of the kernel, for ever."""
    contexts = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "default device": lambda: torch.device("meta"),
        "default dtype": lambda: default_dtype(torch.bfloat16),
    }
    with contexts[state]():
        assert self_check.find_problem(native, CPU, torch.float32) == ""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_a_verdict_of_the_interpreter_is_not_that_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "interpreted", lambda: True)
    interpreted = self_check.conditions(triton, CPU, torch.float32)
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    assert self_check.conditions(triton, CPU, torch.float32) != interpreted


@pytest.mark.parametrize("content", ["", "[]", '{"a": 3}', "{" * 100_000, "\x00", '{"a": "b"'])
def test_a_damaged_file_is_no_verdict(verdicts: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "find_problem", lambda *arguments: "")
    verdicts.parent.mkdir()
    verdicts.write_text(content)
    assert self_check.verdict_of(kernel(), CPU, torch.float32).trusted
    assert list(json.loads(verdicts.read_text()).values()) == [""]


@pytest.mark.parametrize("error", [out_of_memory, full_disk])
def test_an_error_of_the_moment_is_not_stored(verdicts: Path, error: Callable[..., Any]) -> None:
    with pytest.warns(RuntimeWarning, match="could not run: "):
        assert not self_check.verdict_of(kernel(forward=error), CPU, torch.float32).trusted
    assert not verdicts.exists()


def test_every_other_error_is_stored(verdicts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a wrong access to memory, after which the process cannot use the GPU."""
    monkeypatch.setattr(self_check, "_is_usable", lambda device: False)
    with pytest.warns(RuntimeWarning, match="must be started again"):
        assert not self_check.verdict_of(kernel(forward=wrong_access), CPU, torch.float32).trusted
    (stored,) = json.loads(verdicts.read_text()).values()
    assert "illegal memory access" in stored


def test_a_triton_that_cannot_be_imported_is_one_warning(verdicts: Path) -> None:
    attempts = []

    def interpreted() -> bool:
        attempts.append(1)
        raise ImportError("libtriton.so: GLIBC_2.38 not found")

    toy = kernel()
    toy.interpreted = interpreted  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="ImportError: libtriton.so") as caught:
        for _ in range(2):
            assert not self_check.verdict_of(toy, CPU, torch.float32).trusted
            assert not self_check.check_again(toy, CPU, torch.float32).trusted
    assert len(caught) == len(attempts) == 1
    assert not verdicts.exists()


def test_the_widest_call_can_hide_keys() -> None:
    """Such a call starts each kernel twice, and the second launch needs the most shared memory."""
    widest = max((call for _, call in self_check._calls(torch.float32)), key=lambda call: call.q.shape[-1])
    assert widest.q.shape[-1] == MAX_WIDTH
    assert widest.scores.hi is not None


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(self_check, "verdicts_file", lambda: tmp_path / "file" / "kernel_checks.json")
    monkeypatch.setattr(self_check, "find_problem", lambda *arguments: "")
    assert self_check.verdict_of(kernel(), CPU, torch.float32).trusted


# --- the choice of the backend ----------------------------------------------------------------------------------------


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU count as those of a GPU, on which the Triton kernels, in their interpreter, can run."""
    pytest.importorskip("triton")
    monkeypatch.setattr(choose_backend, "_is_on_gpu", lambda q: q.device.type == "cpu")
    if not triton.interpreted():
        pytest.skip("the Triton kernels run on the GPU")


def qkv() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 9, 8, generator=generator) for _ in range(3)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_auto_uses_triton_after_its_check(a_gpu: None, verdicts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some calls of the check run, in the interpreter; all of them take minutes there (the long test below)."""
    calls = self_check._calls
    monkeypatch.setattr(self_check, "_calls", lambda dtype: islice(calls(dtype), 3))
    q, k, v = qkv()
    assert choose_backend.resolve_backend("auto", q, v) == "triton"
    assert list(json.loads(verdicts.read_text()).values()) == [""]
    exact = regard.attention(q.double(), k.double(), v.double(), mask=Causal(), backend="reference")
    torch.testing.assert_close(regard.attention(q, k, v, mask=Causal()).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", self_check.TOLERANCES)
def test_the_triton_kernels_pass_the_whole_check(a_gpu: None, dtype: torch.dtype) -> None:
    assert self_check.find_problem(triton, CPU, dtype) == ""


def test_a_broken_kernel_is_replaced_by_the_reference(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and every result is right: outputs, gradients and observables."""
    forward = triton.forward

    def wrong(*arguments: Any) -> Any:
        result = forward(*arguments)
        return result._replace(out=result.out + 0.1)

    monkeypatch.setattr(triton, "forward", wrong)
    q, k, v = [x.requires_grad_() for x in qkv()]
    with pytest.warns(RuntimeWarning, match=r"triton kernels are not used for float32 .* out differs") as caught:
        out, observation = regard.attention(q, k, v, mask=Causal(), observe=regard.Observe(map=3))
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        regard.attention(q, k, v)
    assert len([one for one in caught if "not used" in str(one.message)]) == 1
    expected, exact = regard.attention(q, k, v, mask=Causal(), observe=regard.Observe(map=3), backend="reference")
    assert torch.equal(out, expected) and torch.equal(observation.map, exact.map)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        assert torch.equal(ours, theirs)
    # A backend that is named runs as it is.
    assert not torch.allclose(regard.attention(q, k, v, backend="triton"), regard.attention(q, k, v), atol=0.05)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_uses_the_verdict(a_gpu: None, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile meets the check without real tensors; the check still runs with real ones, once."""
    kinds = []

    def verdict(*arguments: Any) -> self_check.Verdict:
        kinds.append(type(torch.zeros(1)))
        return self_check.Verdict("for a test")

    monkeypatch.setattr(self_check, "verdict_of", verdict)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: regard.attention(q, k, v), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    q, k, v = qkv()
    assert torch.allclose(compiled(q, k, v), regard.attention(q, k, v, backend="reference"), atol=1e-6)
    assert set(kinds) == {torch.Tensor}


@pytest.mark.parametrize("name", ["reference", "native"])
def test_an_environment_variable_forces_a_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, v = qkv()
    monkeypatch.setenv("REGARD_BACKEND", name)
    assert choose_backend.resolve_backend("auto", q, v) == name
    assert choose_backend.resolve_backend("reference", q, v) == "reference"  # a named backend stays


def test_a_wrong_variable_and_a_call_that_it_cannot_honour_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    monkeypatch.setenv("REGARD_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"^REGARD_BACKEND must be 'auto', .*got 'cuda'"):
        regard.attention(q, k, v)
    monkeypatch.setenv("REGARD_BACKEND", "native")
    with pytest.raises(ValueError, match=r"^REGARD_BACKEND='native' cannot be honoured: .*float64"):
        regard.attention(q.double(), k.double(), v.double())
    monkeypatch.setenv("REGARD_BACKEND", "")
    assert choose_backend.resolve_backend("auto", q, v) == "native"
