"""The linear paths of a forward pass: what each part of a model adds to the residual stream, and how it gets on.

A transformer's residual stream is a sum. Embeddings, heads and feed-forward networks add to it, and on the way to the
logits only norms change it. With every norm's scale frozen, a logit is a sum of what the parts contribute:

    logit = Σ_c ⟨x_c, ∂logit/∂x_c⟩      c = embeddings, heads, feed-forward networks, biases

``LinearPaths`` runs a model in this way, and keeps all its numbers. Every torch function goes through it:

- a *source* begins where something is added to the stream that does not depend linearly on it: the output of a head
  (before W_O), of a linear layer inside a block, an embedding, a bias;
- linear functions of sources are left to autograd;
- the result of any other function depends on no source any more. It is *dependent*: if it is added to the stream, it
  becomes a source itself.

In the backward pass, each source reports ⟨x_c, ∂logit/∂x_c⟩.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from regard._hooks import is_own_computation, own_computation
from regard._running_modules import RunningModules
from regard.interp._linear_functions import (
    FACTORIES,
    GUARDS,
    JOINS,
    LAYOUTS,
    MATRIX_PRODUCTS,
    NORMS,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
    TorchCall,
    bias_of,
    frozen_norm,
    function_name,
    is_number_tensor,
    map_tensors,
    tensors_of,
    without_bias,
)
from regard.interp._model_blocks import (
    CONSTANT,
    EMBEDDING,
    HEAD,
    POSITIONS,
    TOKENS,
    UNSEEN,
    ModelBlocks,
    is_inside,
    names_positions,
)
from regard.interp._path_sources import Source, Sources

_MULTI_HEAD_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


class LinearPaths(TorchFunctionMode):
    """Runs a model with linear paths. A context manager: inside it, call the model under ``torch.enable_grad()``.

    - ``paths``: the paths of the model's modules.
    - ``attention``: the paths at which attention is computed.
    - ``vocabulary``: V, the number of logits, if logits are split.
    - ``ids``: the tokens that the model reads, if they are known.
    - ``opened``: the path of an attention whose queries and keys stay linear.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: dict[nn.Module, str],
        attention: list[str],
        *,
        vocabulary: int | None = None,
        ids: Tensor | None = None,
        opened: str | None = None,
    ) -> None:
        super().__init__()
        self.paths = paths
        self.model_blocks = ModelBlocks(model, attention)
        self.sources = Sources()
        self.vocabulary = vocabulary
        self.ids = ids
        self.opened = opened
        self.running = RunningModules()
        # Filled while the model runs: what logits were before a soft cap, and why heads do not reach the stream.
        self.uncapped: Tensor | None = None
        self.has_vocabulary_layer = False
        self.problems: dict[str, str] = {}
        self.ended_by: dict[str, str] = {}  # the function that ended linear paths, by module
        self._calls: dict[str, int] = {}
        # Tensors that depend on the input without a linear path, with the module that made them; and outputs of heads
        # that were not yet added to the stream, with the paths of their attention.
        self._dependent = WeakTensorKeyDictionary()
        self._heads = WeakTensorKeyDictionary()
        self._constants = {id(parameter): name for name, parameter in model.named_parameters()}
        self._constants |= {id(buffer): name for name, buffer in model.named_buffers()}
        self._stack = ExitStack()

    def __enter__(self) -> LinearPaths:
        # Hooks first: they tell which module runs.
        self._stack.enter_context(self.running.followed(self.paths))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    # --- sources ------------------------------------------------------------------------------------------------------

    def begin_at_heads(self, path: str, out: Tensor) -> tuple[Tensor, Source]:
        """The output of heads ``[*B, H, n, E]`` as a source."""
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        source = Source(HEAD, path, call)
        with own_computation(), torch.enable_grad():
            begun = self.sources.begin(out.detach().clone(), source)
            self._heads[begun] = (path,)
        return begun, source

    def label_of(self, x: Tensor) -> str | None:
        """What ended the linear paths to a tensor, in words; None if it has linear paths."""
        if x.requires_grad:
            return None
        label: str = self._dependent.get(x, "")
        function = self.ended_by.get(label)
        where = label or "the model itself"
        return where if function is None else f"{function} in {where}"

    def _begin_constant(self, value: Tensor) -> Tensor:
        """A tensor that depends on no token as a source: a bias, or an encoding of positions."""
        path = self._path()
        kind = CONSTANT
        if value.ndim >= 2 and not self.model_blocks.in_block(path) and (value.shape[-2] > 1 or names_positions(path)):
            kind = POSITIONS
        return self.sources.begin(value.detach(), Source(kind, self._constants.get(id(value), path)))

    # --- where a function runs ----------------------------------------------------------------------------------------

    def _path(self) -> str:
        running = self.running.innermost
        return running.path if running is not None else ""

    def _is_cut(self, path: str) -> bool:
        """Whether a linear layer at this path begins a new source."""
        if self.opened is not None and is_inside(path, self.opened):
            return False
        return self.model_blocks.in_block(path)

    # --- functions ----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What regard computes is not the model's; within vmap, tensors stand for other tensors.
        if is_own_computation() or torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        name = function_name(func)
        if name == "embedding":
            return self._embed(func, args, kwargs)
        linear = []
        dependent = []
        for x in tensors_of(args, kwargs):
            if x.requires_grad:
                linear.append(x)
            elif x in self._dependent:
                dependent.append(x)
        # Functions that take only the shape of a tensor make constants.
        if not (linear or dependent) or name in FACTORIES:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._run_multi_head(func, args, kwargs)
        call = TorchCall(func, name, args, kwargs, linear, dependent)
        if not torch.is_grad_enabled() or kwargs.get("out") is not None:
            return self._depend(call)
        if name in MATRIX_PRODUCTS:
            return self._multiply(call)
        if not linear or not self._is_linear(call):
            return self._depend(call)
        out = self._run_linear(call)
        self._follow_heads(call, out)
        return out

    def _is_linear(self, call: TorchCall) -> bool:
        """Whether a function, which is no matrix product, keeps linear paths."""
        name = call.name
        args = call.args
        if name in LAYOUTS or name in JOINS:
            return True
        if name in PRODUCTS:
            # What a norm divides by is frozen. The product of two linear values is not linear.
            return len(call.linear) == 1 and (name not in QUOTIENTS or args[0] is call.linear[0])
        if name == "addcmul":
            return len(args) == 3 and not (_is_linear_tensor(args[1]) and _is_linear_tensor(args[2]))
        if name in NORMS:
            return bool(args) and args[0] is call.linear[0] and not call.in_place
        if name in GUARDS:
            with torch.no_grad():
                return torch.equal(call.func(*map_tensors(Tensor.clone, args), **call.kwargs), args[0])
        # A soft cap of the logits, c·tanh(logit / c). The logit before the cap is split.
        is_logits = call.linear[0].ndim > 0 and call.linear[0].shape[-1] == self.vocabulary
        return name == "tanh" and is_logits and self.uncapped is None and not self.model_blocks.in_block(self._path())

    def _run_linear(self, call: TorchCall) -> Any:
        args = call.args
        if call.name in JOINS:
            return self._join(call)
        if call.name == "addcmul":
            # Each step goes through this mode again.
            product = self.__torch_function__(torch.mul, (), (args[1], args[2]))
            scaled = self.__torch_function__(torch.mul, (), (product, call.kwargs.get("value", 1)))
            return self.__torch_function__(torch.add, (), (args[0], scaled))
        if call.name in NORMS:
            return frozen_norm(call.name, args[0], self._add_constant, args[1:], call.kwargs)
        if call.name in GUARDS:
            return args[0].clone()
        if call.name == "tanh":
            self.uncapped = call.linear[0].detach()
            return call.linear[0].clone()
        return call.func(*args, **call.kwargs)

    def _join(self, call: TorchCall) -> Any:
        """A sum, or tensors that are put beside each other: those without a linear path become sources."""
        args = call.args
        if call.name in SUMS and len(args) > 1 and isinstance(args[1], int | float) and args[1]:
            args = (args[0], torch.full_like(args[0], args[1]).detach())
        if not call.in_place:
            args, kwargs = map_tensors(self._as_source, (args, call.kwargs))
            return call.func(*args, **kwargs)
        target = args[0]
        if call.name != "copy":
            begun = self._as_source(target)
            if begun is not target:
                target.copy_(begun)
        rest, kwargs = map_tensors(self._as_source, (args[1:], call.kwargs))
        return call.func(target, *rest, **kwargs)

    def _as_source(self, x: Tensor) -> Tensor:
        """A tensor that has no linear path as a source; others, ids and zeros as they are."""
        if x.requires_grad or not is_number_tensor(x) or not bool(x.any()):
            return x
        label = self._dependent.get(x)
        if label is None:
            return self._begin_constant(x)
        return self.sources.begin(x.detach().clone(), Source(self.model_blocks.kind(label), label))

    def _add_constant(self, y: Tensor, bias: Tensor) -> Tensor:
        return y + self._begin_constant(bias).to(y.dtype)

    def _multiply(self, call: TorchCall) -> Any:
        """A product with a matrix. Inside a block it begins a source, unless it is the output projection of heads."""
        bias = bias_of(call)
        if len(call.linear) > 1 or call.in_place:
            return self._depend(call)
        args = call.args
        kwargs = call.kwargs
        func = call.func
        if bias is not None:
            args, kwargs, func = without_bias(call)
        path = self._path()
        # Another factor that depends on the input is frozen, as the weights of experts are.
        if call.linear and (call.linear[0] in self._heads or call.dependent or not self._is_cut(path)):
            out = func(*args, **kwargs)
            if out.shape[-1:] == (self.vocabulary,) and not self.model_blocks.in_block(path):
                self.has_vocabulary_layer = True
            if bias is not None:
                out = self._add_constant(out, bias)
            self._follow_heads(call, out)
            return out
        label = self.model_blocks.label(path)
        is_product_of_stream = len(call.linear) + len(call.dependent) == 1
        if not is_product_of_stream or not self._is_cut(path) or self.model_blocks.kind(label) == UNSEEN:
            return self._depend(call)
        with torch.no_grad():
            out = func(*args, **kwargs)
        begun = self.sources.begin(out, Source(self.model_blocks.kind(label), label))
        if bias is not None:
            return self._add_constant(begun, bias)
        return begun

    def _embed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Rows of a table: a source, unless they are biases of attention."""
        out = func(*args, **kwargs)
        path = self._path()
        if not torch.is_grad_enabled() or self.model_blocks.in_attention(path) or not is_number_tensor(out):
            return out
        indices = args[0] if args else kwargs["input"]
        table = args[1] if len(args) > 1 else kwargs["weight"]
        return self.sources.begin(out.detach(), Source(self._kind_of_embedding(indices, table, path), path))

    def _kind_of_embedding(self, indices: Tensor, table: Tensor, path: str) -> str:
        """What a table holds: tokens, positions, or something else, such as the types of tokens."""
        if names_positions(path):
            return POSITIONS
        if self.vocabulary is not None and table.shape[0] >= self.vocabulary:
            return TOKENS
        if self.ids is not None:
            is_text = torch.equal(indices.reshape(-1).to(self.ids), self.ids.reshape(-1))
            if is_text and not self.model_blocks.in_block(path):
                return TOKENS
            return EMBEDDING
        name = path.rpartition(".")[2].lower()
        if self.vocabulary is not None or "type" in name or "segment" in name:
            return EMBEDDING
        return TOKENS

    def _run_multi_head(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Torch's own multi-head attention: its heads are sources, and so is the bias of its output projection."""
        bound = _MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
        for name in ("query", "key", "value"):
            bound.arguments[name] = bound.arguments[name].detach()
        bias = bound.arguments["out_proj_bias"]
        if bias is not None:
            bound.arguments["out_proj_bias"] = self._begin_constant(bias)
        return func(**bound.arguments)

    # --- what is remembered of results --------------------------------------------------------------------------------

    def _depend(self, call: TorchCall) -> Any:
        """Call a function that ends linear paths, and remember that its results depend on the input."""
        args = call.args
        kwargs = call.kwargs
        if call.linear:
            args, kwargs = map_tensors(_without_graph, (args, kwargs))
            # Autograd knows the old numbers of the tensor: a copy is changed.
            if call.in_place:
                args = (args[0].clone(), *args[1:])
        out = call.func(*args, **kwargs)
        path = self._path()
        label = self.model_blocks.label(path)
        # In the code of a block, and outside of blocks, a result belongs to what ended the linear paths.
        is_passed_on = self.model_blocks.has_attention(path) or not self.model_blocks.in_block(path)
        if call.dependent and not call.linear and is_passed_on:
            label = self._dependent[call.dependent[0]]
        results = [x for x in tensors_of((out,), {}) if is_number_tensor(x)]
        if call.in_place and not call.linear:
            results.append(args[0])
        for x in results:
            if not x.requires_grad:
                self._dependent[x] = label
                self.ended_by.setdefault(label, call.name)
        for x in call.linear:
            if results:
                self._note_problem(x, f"{call.name} is applied to the output of its heads in {path or 'the model'}")
        return out

    def _follow_heads(self, call: TorchCall, out: Any) -> None:
        """Remember which results are outputs of heads that were not added to the stream yet."""
        marks = [self._heads.get(x) for x in call.linear]
        known = [mark for mark in marks if mark is not None]
        if not known or self._adds_stream(call):
            return
        if len(known) < len(marks):
            if call.name not in SUMS:
                for x in call.linear:
                    self._note_problem(x, f"{call.name} joins the output of its heads with other values")
            return
        paths = tuple(dict.fromkeys(path for mark in known for path in mark))
        results = [x for x in tensors_of((out,), {}) if x.requires_grad]
        if call.in_place:
            results.append(call.args[0])
        for x in results:
            self._heads[x] = paths

    def _adds_stream(self, call: TorchCall) -> bool:
        """Whether a sum has a term that no linear path leads to, as the stream of an image encoder has none."""
        if call.name not in SUMS:
            return False
        terms = [x for x in call.args if isinstance(x, Tensor)]
        return any(not x.requires_grad and x.ndim > 1 and x.shape == terms[0].shape for x in terms)

    def _note_problem(self, x: Tensor, problem: str) -> None:
        for path in self._heads.get(x, ()):
            self.problems.setdefault(path, problem)


def _without_graph(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _is_linear_tensor(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
