"""Run a model once on random inputs, and record what its attention layers read, project and write.

The circuits of a model are products of its weights. This run finds out which weights these are, whatever the modules
are called, and shows that they are right: queries, keys and values of the run must be what the found matrices give.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import RegardError
from regard._hooks import AttentionCall, Observer
from regard._observables import Observation, Observe
from regard._running_modules import ContextHook
from regard.interp._output_projection import input_width
from regard.interp._probes import run_model
from regard.interp._register_observers import NO_VISIBLE_ATTENTION, observing
from regard.interp.huggingface import is_pretrained
from regard.nn._multi_head_attention import MultiHeadAttention
from regard.nn._stack import Stack

TEXTS = 8  # not a divisor of usual lengths, so that the axes of texts and of positions cannot be confused
MOST_CALLS = 24  # the last calls of linear layers and norms before an attention call in which its parts are searched


@dataclass(eq=False)
class LinearCall:
    """One call of a linear layer: what it read ``[*, D_in]`` and what it wrote ``[*, D_out]``."""

    path: str
    layer: nn.Module
    x: Tensor
    y: Tensor


@dataclass(eq=False)
class NormCall:
    """One call of a norm: what it read and wrote, in one shape."""

    path: str
    layer: nn.Module
    x: Tensor
    y: Tensor


@dataclass(eq=False)
class ProbedCall:
    """One attention call of the run.

    - ``q [B, H, n, d]``, ``k [B, G, m, d]``, ``v [B, G, m, E]``, ``out [B, H, n, E]``: copies of its tensors.
    - ``linears``, ``norms``: the calls before it, the last one first.
    - ``readers``: the calls of linear layers that read the output of the heads.
    - ``out_norms``: the norms that ran between this call and the next one.
    - ``scale``: the factor of q·k. ``bias [H, n, n]``: what is added to scores, up to a constant
      per row; None: nothing.
    """

    path: str
    cross: bool
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    linears: list[LinearCall]
    norms: list[NormCall]
    readers: list[LinearCall] = field(default_factory=list)
    out_norms: list[NormCall] = field(default_factory=list)
    scale: float = 1.0
    bias: Tensor | None = None


@dataclass(eq=False)
class ProbedRun:
    """Everything that was recorded.

    - ``calls``: the first call of each attention layer, in their order.
    - ``embeddings``: the tables that were called with ids ``[B, n]``, and these ids.
    - ``logits [B, n, V]``: None if the model returns none.
    - ``last_norm``: the last call of a norm. ``block_outputs``: the last outputs of the blocks of stacks.
    """

    calls: list[ProbedCall]
    embeddings: list[tuple[nn.Embedding, Tensor]]
    logits: Tensor | None
    last_norm: NormCall | None
    block_outputs: list[Tensor]


class _Recorder(Observer):
    """Records the calls of linear layers, norms, embeddings and attention while the model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: list[ProbedCall] = []
        self.refused: list[str] = []
        self.embeddings: list[tuple[nn.Embedding, Tensor]] = []
        self.last_norm: NormCall | None = None
        self.linears: deque[LinearCall] = deque(maxlen=MOST_CALLS)
        self.norms: deque[NormCall] = deque(maxlen=MOST_CALLS)
        self.blocks: deque[Tensor] = deque(maxlen=2)
        self._pending: ProbedCall | None = None

    # --- hooks ---

    def add_hooks(self, stack: ExitStack) -> None:
        for module in self.model.modules():
            after: Callable[..., None] | None = None
            if isinstance(module, nn.Embedding):
                after = self._after_embedding
            elif isinstance(module, nn.MultiheadAttention):
                before = ContextHook(self._before_torch_layer)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                after = self._after_torch_layer
            elif input_width(module) is not None:
                after = self._after_linear
            elif "norm" in type(module).__name__.lower():
                after = self._after_norm
            if after is not None:
                stack.callback(module.register_forward_hook(ContextHook(after)).remove)
            if isinstance(module, nn.ModuleList):
                for block in module:
                    stack.callback(block.register_forward_hook(ContextHook(self._after_block)).remove)

    def _after_embedding(self, module: nn.Embedding, args: Any, _out: Any) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim == 2:
            self.embeddings.append((module, _copy(args[0])))

    def _after_linear(self, module: nn.Module, args: Any, out: Any) -> None:
        if not args or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
            return
        call = LinearCall(self.paths.get(module, ""), module, _copy(args[0]), _copy(out))
        self.linears.appendleft(call)
        pending = self._pending
        if pending is not None and _holds_heads(call.x, pending.out):
            pending.readers.append(call)

    def _after_norm(self, module: nn.Module, args: Any, out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor) and args[0].shape == out.shape:
            call = NormCall(self.paths.get(module, ""), module, _copy(args[0]), _copy(out))
            self.norms.appendleft(call)
            self.last_norm = call
            if self._pending is not None:
                self._pending.out_norms.append(call)

    def _after_block(self, _module: nn.Module, _args: Any, out: Any) -> None:
        if isinstance(out, tuple) and out:
            out = out[0]
        if isinstance(out, Tensor):
            self.blocks.append(_copy(out))

    def _before_torch_layer(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """torch's layer projects without calling a linear layer, so its three projections are recorded here."""
        names = ("query", "key", "value")
        inputs = dict(zip(names, args, strict=False))
        inputs |= {name: kwargs[name] for name in names if name in kwargs}
        for part, name in zip("qkv", names, strict=True):
            x = inputs[name].detach()
            weight, bias = torch_projection(module, part)
            y = nn.functional.linear(x, weight, bias)
            self.linears.appendleft(LinearCall(f"{part} of torch's layer", module, _copy(x), _copy(y)))

    def _after_torch_layer(self, module: nn.MultiheadAttention, _args: Any, out: Any) -> None:
        pending = self._pending
        if pending is not None and self.paths.get(module) == pending.path:
            y = _copy(out[0])
            joined = pending.out.transpose(1, 2).flatten(2).to(y.dtype)
            if not module.batch_first:
                joined = joined.transpose(0, 1)
            if y.shape[:2] == joined.shape[:2]:
                pending.readers = [LinearCall(f"{pending.path}.out_proj", module.out_proj, joined, y)]

    # --- attention calls ---

    def before(self, call: AttentionCall) -> Observe | None:
        if call.q is None:
            return None
        return Observe(keep=True)

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        self._pending = None
        if any(probed.path == call.path for probed in self.calls):
            return out  # layers that share their weights are called several times
        if call.q is None or call.k is None or observation is None:
            self.refused.append(f"{call.path or 'the model itself'}: the model computes its weights itself")
            return out
        probed = ProbedCall(
            path=call.path,
            cross=call.cross,
            q=_four_axes(call.q),
            k=_four_axes(call.k),
            v=_four_axes(call.v),
            out=_four_axes(out),
            linears=list(self.linears),
            norms=list(self.norms),
        )
        scores: Any = getattr(observation.saved_calls[0], "scores", None)
        if scores is not None:
            probed.scale = float(scores.scale)
            if scores.bias is not None or scores.terms:
                probed.bias = _added_to_scores(observation, probed)
        self.calls.append(probed)
        self._pending = probed
        return out


def _four_axes(x: Tensor) -> Tensor:
    return _copy(x.reshape(-1, *x.shape[-3:]))


def _copy(x: Tensor) -> Tensor:
    """A copy on the CPU, where circuits are computed, so that they do not depend on what a device lacks."""
    return x.detach().cpu().clone()


def _holds_heads(x: Tensor, out_BHNE: Tensor) -> bool:
    """Whether a linear layer read the joined output of all heads."""
    B, H, n, E = out_BHNE.shape
    if x.shape[-1] != H * E or x.numel() != out_BHNE.numel():
        return False
    joined = out_BHNE.transpose(1, 2).reshape(B * n, H * E).to(x.dtype)
    if torch.equal(x.reshape(-1, H * E), joined):
        return True
    if x.ndim == 3 and x.shape[:2] == (n, B):  # texts on the second axis
        return torch.equal(x.transpose(0, 1).reshape(-1, H * E), joined)
    return False


def _added_to_scores(observation: Observation, call: ProbedCall) -> Tensor:
    """What is added to q·k in the first text, minus its value on the diagonal of each row: ``[H, n, m]``.

    log A = scale·q·k + bias − lse, and lse is a constant of the row. Keys that are not visible get NaN.
    """
    rows = []
    groups = call.q.shape[1] // call.k.shape[1]
    for h in range(call.q.shape[1]):
        log_weights = observation.weights(h, batch=0).cpu().double().log()
        products = call.scale * call.q[0, h].double() @ call.k[0, h // groups].double().T
        added = log_weights - products
        added[~log_weights.isfinite()] = torch.nan
        if added.shape[0] == added.shape[1]:
            added = added - added.diagonal().unsqueeze(-1)
        rows.append(added)
    return torch.stack(rows)


def torch_projection(layer: nn.Module, part: str) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of q, k or v of ``nn.MultiheadAttention``."""
    index = "qkv".index(part)
    module: Any = layer
    if module.in_proj_weight is not None:
        weight = module.in_proj_weight.chunk(3)[index]
    else:
        weight = getattr(module, f"{part}_proj_weight")
    bias = None
    if module.in_proj_bias is not None:
        bias = module.in_proj_bias.chunk(3)[index]
    return weight, bias


def probe(model: nn.Module, inputs: Tensor | Callable[[], Any] | None, length: int) -> ProbedRun:
    """Run a model on random inputs, or on those of the user.

    - ``inputs``: token ids, images or vectors, or a function that runs the model; None: random ones.
    - ``length``: tokens per random text.
    """
    is_default = inputs is None
    if inputs is None:
        inputs = random_inputs(model, length)
    recorder = _Recorder(model)
    training = model.training
    model.eval()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            recorder.add_hooks(stack)
            stack.enter_context(observing(recorder))
            if not isinstance(inputs, Tensor):
                output = inputs()
            elif is_default:
                output = _run_on_random_inputs(model, inputs)
            else:
                output = _run(model, inputs)
    finally:
        model.train(training)
    if recorder.refused:
        raise RegardError(f"the circuits of {type(model).__name__} are unknown: {recorder.refused[0]}")
    if not recorder.calls:
        raise RegardError(f"{type(model).__name__} {NO_VISIBLE_ATTENTION}")
    if recorder.calls[0].q.shape[0] < 2:
        raise RegardError("inputs must hold at least 2 texts, so that tokens and positions can be told apart, got 1")
    return ProbedRun(recorder.calls, recorder.embeddings, _logits(output), recorder.last_norm, [*recorder.blocks])


def _run_on_random_inputs(model: nn.Module, inputs: Tensor) -> Any:
    """Run a model on inputs that may not be of the kind that it reads."""
    try:
        return _run(model, inputs)
    except RegardError:
        raise
    # Models refuse inputs that they do not read with any kind of error.
    except Exception as error:
        raise RegardError(
            f"{type(model).__name__} does not run on random inputs {list(inputs.shape)} alone; give inputs=, a tensor "
            "or a function that runs the model"
        ) from error


def _run(model: nn.Module, inputs: Tensor) -> Any:
    parameter = next(model.parameters(), inputs)
    if isinstance(model, nn.MultiheadAttention):
        x = inputs.to(parameter)
        return model(x, x, x, need_weights=False)
    return run_model(model, inputs)


def _logits(output: Any) -> Tensor | None:
    """The logits of a model's output; other outputs are None."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if isinstance(logits, Tensor) and logits.ndim == 3:
        return logits.cpu()
    return None


def random_inputs(model: nn.Module, length: int) -> Tensor:
    """Random token ids ``[B, n]``, images, or vectors ``[B, n, D]``: whatever the model reads. Always the same.

    >>> random_inputs(regard.nn.Decoder(6, heads=3, layers=1, vocab=11), 4).shape
    torch.Size([8, 4])
    """
    generator = torch.Generator().manual_seed(0)
    config: Any = getattr(model, "config", None)
    if is_pretrained(model) and getattr(model, "main_input_name", "") == "pixel_values":
        height, width, channels = _image_size(model)
        return torch.randn(TEXTS, channels, height, width, generator=generator)
    vocab = _vocabulary(model)
    if vocab is None:
        return torch.randn(TEXTS, length, _width(model), generator=generator)
    ids = torch.randint(0, vocab, (TEXTS, length), generator=generator)
    # Padding would not be attended to, and may have no position.
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and vocab > 1:
        ids = torch.where(ids == pad, (ids + 1) % vocab, ids)
    return ids


def _image_size(model: nn.Module) -> tuple[int, int, int]:
    config: Any = model.config
    side = getattr(config, "image_size", None)
    channels = getattr(config, "num_channels", None)
    if side is None or channels is None:
        raise RegardError(
            f"the images that {type(model).__name__} reads are not known; give inputs=, a tensor of images"
        )
    if isinstance(side, int):
        side = (side, side)
    return int(side[0]), int(side[1]), int(channels)


def _vocabulary(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        size = getattr(config.get_text_config(), "vocab_size", None)
        if size is not None:
            return int(size)
    for module in model.modules():
        if isinstance(module, Stack):
            if module.tokens is None:
                return None
            return module.tokens.vocab
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables, default=None)


def _width(model: nn.Module) -> int:
    """The width of the vectors that a model without a vocabulary reads."""
    for module in model.modules():
        if isinstance(module, Stack):
            return module.d
        if isinstance(module, MultiHeadAttention):
            return module.d_in
        if isinstance(module, nn.MultiheadAttention):
            return int(module.embed_dim)
    raise RegardError(
        f"{type(model).__name__} reads no tokens and its inputs are not known; give inputs=, a tensor or a function "
        "that runs the model"
    )
