"""Recognise attention that a model writes by hand, ``softmax(q @ k.T) @ v``, and measure the weights that it makes.

Three kinds of tensors are followed through a forward pass:

- *scores*: a product of two activations, and whatever elementwise operations make of it;
- *weights*: the softmax of scores, in any layout, also after dropout, casts and zeros at hidden keys;
- the product of weights with values, which is the output of the heads. Here observers are called.

Scores are deferred first (``regard.interp._deferred_scores``). If they are still not computed at the product with
values, regard's attention computes it from q, k and v. Otherwise the model keeps its own numbers, and the weights that
are measured are those in its memory.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from regard._hooks import Observer, is_own_computation, observe_weights, run_attention
from regard._running_modules import RunningModules
from regard.interp._axis_tracking import LAYOUT_OPERATIONS, JoinedAxes, follow_axis
from regard.interp._deferred_scores import (
    SOFTMAXES,
    DeferredScores,
    continue_deferred,
    defer_product,
)
from regard.interp._deferred_tensor import QUESTIONS
from regard.interp._followed_tensors import (
    HIDDEN_RANGE,
    NO_SCORES,
    OTHER_WEIGHTS,
    SAME_WEIGHTS,
    ZEROS,
    Softmax,
    Weights,
    change_count,
    changes_in_place,
    first_tensor,
    has_deferred,
    may_share_memory,
    softmax_axis,
)
from regard.interp._matrix_products import EINSUMS, MATMULS, MatrixProduct, ValueProduct, matrix_product, value_product
from regard.interp._score_parts import Part


class HandwrittenAttention:
    """Follows the torch functions that a model calls.

    - ``observers``: returns the observers of the module that runs, with its path. They are told that attention was
      reached there.
    - ``is_observed``: whether the module that runs has observers.
    """

    def __init__(
        self,
        running: RunningModules,
        observers: Callable[[], list[tuple[Observer, str]]],
        is_observed: Callable[[], bool],
    ) -> None:
        self._running = running
        self._observers = observers
        self._is_observed = is_observed
        # The deferred scores of this forward pass, and whether there were any.
        self._deferred: list[weakref.ref[DeferredScores]] = []
        self._has_deferred = False
        self._scores = WeakTensorKeyDictionary()
        self._joined = JoinedAxes()
        self._weights = WeakTensorKeyDictionary()
        # The softmaxes of this forward pass.
        self._softmaxes: list[Softmax] = []
        # Paths at which attention was not recognised, in the order in which they ran.
        self._unseen: dict[str, None] = {}

    def unseen(self) -> list[str]:
        """The paths of modules whose attention could not be observed, each once."""
        self._forget_softmaxes()
        return list(self._unseen)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a torch function for the model, and follow what it does."""
        # The reference backend is no model. Within vmap, jvp and their like, tensors stand for other tensors.
        if is_own_computation() or torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        if self._has_deferred:
            if changes_in_place(func, kwargs):
                self._compute_before_change(args, kwargs)
            if func not in QUESTIONS and has_deferred(args, kwargs):
                return self._use_deferred(func, args, kwargs)
        if func in MATMULS or func in EINSUMS:
            return self._multiply(func, args, kwargs)
        out = self._follow(func, args, kwargs)
        self._joined.follow(func, args, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function that is no product, and remember what it makes of scores and weights."""
        if not len(self._scores) and not len(self._weights):
            return func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        for x in tensors:
            weights = self._known_weights(x)
            if weights is not None:
                return self._change_weights(func, args, kwargs, weights, x)
        # The operands of a concatenation are in a list.
        if args and isinstance(args[0], list | tuple):
            tensors += [x for x in args[0] if isinstance(x, Tensor)]
        if any(x in self._scores for x in tensors):
            return self._change_scores(func, args, kwargs, tensors)
        return func(*args, **kwargs)

    def _forget_softmaxes(self) -> None:
        for softmax in self._softmaxes:
            # Some models compute a softmax and never use it (SAM 2).
            if softmax.exists and not softmax.used:
                self._unseen[softmax.path] = None
        self._softmaxes.clear()

    def compute_deferred(self, result: Any = None) -> Any:
        """At the end of a forward pass, compute all deferred scores that are still referenced.

        ``result`` comes back with their numbers in it.
        """
        for ref in self._deferred:
            x = ref()
            if x is not None:
                x.dense()
        for ref in self._deferred:
            x = ref()
            if x is not None:
                x.release()
        self._deferred.clear()
        self._forget_softmaxes()
        if not self._has_deferred:
            return result
        self._has_deferred = False
        return tree_map_only(DeferredScores, DeferredScores.dense, result)

    def _alive(self) -> list[DeferredScores]:
        """The deferred scores that are still referenced and not computed."""
        self._deferred = [ref for ref in self._deferred if ref() is not None]
        alive = []
        for ref in self._deferred:
            x = ref()
            if x is not None and not x.is_computed:
                alive.append(x)
        return alive

    def _compute_before_change(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Compute the deferred scores that need the numbers which an operation in place is about to overwrite."""
        changed = tree_leaves(kwargs["out"]) if "out" in kwargs else tree_leaves(args[:1])
        for target in changed:
            if not isinstance(target, Tensor) or isinstance(target, DeferredScores):
                continue
            for x in self._alive():
                if any(may_share_memory(operand, target) for operand in x.scores.operands()):
                    x.dense()

    def _use_deferred(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A function of deferred scores: its result is deferred, too, or their numbers are computed."""
        if func in MATMULS or func in EINSUMS:
            product = matrix_product(func, args, kwargs)
            if product is not None:
                out = self._attend(product)
                if out is not None:
                    return out
        else:
            result = continue_deferred(func, args, kwargs)
            if result is not None:
                if func in SOFTMAXES and self._running.innermost is not None:
                    self._note_softmax(result, self._running.innermost.path)
                self._deferred.append(weakref.ref(result))
                return result
        if args and isinstance(args[0], DeferredScores) and changes_in_place(func, kwargs):
            args[0].compute_what_depends()
            numbers = self._numbers(args[0])
            args[0].mark_changed()
            return self.call(func, (numbers, *tree_map_only(DeferredScores, self._numbers, args[1:])), kwargs)
        args, kwargs = tree_map_only(DeferredScores, self._numbers, (args, kwargs))
        return self.call(func, args, kwargs)

    def _note_softmax(self, weights: DeferredScores, path: str) -> None:
        softmax = Softmax(path, exists=False)
        make = weights._make
        assert make is not None

        def make_and_note() -> Tensor:
            softmax.exists = True
            return make()

        weights._make = make_and_note
        weights.softmax_record = softmax
        self._softmaxes.append(softmax)

    def _numbers(self, x: DeferredScores) -> Tensor:
        """The numbers of deferred scores, which are followed from now on as those that the model computed."""
        numbers = x.dense()
        if x.before_softmax is None:
            self._scores[numbers] = True
        elif x.softmax_record is not None and not x.was_changed and numbers not in self._weights:
            scores = None
            if not x.before_softmax.was_changed:
                scores = x.before_softmax.dense().reshape(x.shape)
            self._note_weights(numbers, x.softmax_record, scores, x.ndim - 1)
        return numbers

    def _note_weights(self, w: Tensor, softmax: Softmax | None, scores: Tensor | None, key_axis: int) -> None:
        scores_version = None if scores is None else change_count(scores)
        self._weights[w] = Weights(softmax, scores, key_axis, change_count(w), scores_version)

    def _known_weights(self, x: Tensor) -> Weights | None:
        """What is known about a tensor of weights; None if it is none, or if somebody changed it in place."""
        weights: Weights | None = self._weights.get(x)
        if weights is None or weights.version == change_count(x):
            return weights
        del self._weights[x]
        return None

    def _attend(self, product: MatrixProduct) -> Tensor | None:
        """Compute the product of deferred weights with values by regard's attention; None if it is something else."""
        weights = product.a if isinstance(product.a, DeferredScores) else product.b
        if not isinstance(weights, DeferredScores) or weights.is_computed or weights.softmax_record is None:
            return None
        values = value_product(product, weights is product.a, weights.ndim - 1)
        if values is None or isinstance(values.v, DeferredScores):
            return None
        if values.lead != weights.shape[:-2] or values.weights_order != tuple(range(weights.ndim)):
            return None
        scores = weights.scores
        shape = self._batch_and_heads(values, [product.a, product.b, *scores.factors])
        if shape is None or (scores.masks and shape != values.lead):
            return None
        if scores.needs_gradients() or torch.is_autocast_enabled(scores.q.tensor.device.type):
            return None
        options = scores.attention_options(*shape)
        if options is None or not self._is_observed():
            return None
        observers = self._observers()
        q = scores.q.with_heads(*shape)
        q = q.expand(*shape, *q.shape[-2:])
        k = scores.k.with_heads(*shape)
        v = Part(values.v, values.lead).with_heads(*shape)
        dtype = torch.promote_types(q.dtype, v.dtype)
        softmax: Softmax = weights.softmax_record
        options |= {"copies": True, "measure": not softmax.measured}
        out, _ = run_attention(observers, q.to(dtype), k.to(dtype), v.to(dtype), **options)
        softmax.used = True
        softmax.measured.add("deferred")
        return values.as_model(out.to(weights.dtype))

    def _multiply(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        product = matrix_product(func, args, kwargs)
        if product is None:
            return func(*args, **kwargs)
        for factor, is_first in ((product.a, True), (product.b, False)):
            weights = self._known_weights(factor)
            if weights is None:
                continue
            values = value_product(product, is_first, weights.key_axis)
            if values is None:
                continue
            out = func(*args, **kwargs)
            other = product.b if is_first else product.a
            if weights.softmax is None or self._known_weights(other) is not None:
                # Products of weights with weights are parts of something else (Nyströmformer).
                self._note_other_weights()
                if out.ndim >= 3:
                    self._note_weights(out, None, None, out.ndim - 1)
                return out
            return self._observe(weights, factor, values, out, [product.a, product.b])
        is_learned = isinstance(product.a, nn.Parameter) or isinstance(product.b, nn.Parameter)
        if is_learned or len(product.out_axes) < 3 or not product.a.is_floating_point():
            return func(*args, **kwargs)
        if self._may_defer(product):
            deferred = defer_product(product, lambda: func(*args, **kwargs))
            if deferred is not None:
                self._deferred.append(weakref.ref(deferred))
                self._has_deferred = True
                return deferred
        out = func(*args, **kwargs)
        self._scores[out] = True
        return out

    def _may_defer(self, product: MatrixProduct) -> bool:
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(product.a.device.type):
            return False
        if torch.is_grad_enabled() and (product.a.requires_grad or product.b.requires_grad):
            return False
        return self._is_observed()

    def _change_scores(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """An operation on scores: it makes weights, or other scores, or something else."""
        out = func(*args, **kwargs)
        if func is Tensor.__setitem__ and args[0].ndim >= 3:
            # Scores of blocks are collected in one tensor.
            self._scores[args[0]] = True
        if not isinstance(out, Tensor) or out.ndim < 3 or not out.is_floating_point() or func in NO_SCORES:
            return out
        if func in SOFTMAXES and self._running.innermost is not None:
            axis = softmax_axis(args, kwargs, out.ndim)
            if axis is not None:
                softmax = Softmax(self._running.innermost.path)
                self._softmaxes.append(softmax)
                self._note_weights(out, softmax, tensors[0], axis)
            return out
        if func in OTHER_WEIGHTS:
            self._note_weights(out, None, None, out.ndim - 1)
            return out
        # A linear layer or a convolution may mix the scores of several heads; another shape is something else.
        if func not in (F.linear, F.conv1d, F.conv2d) or out.shape == tensors[0].shape:
            self._scores[out] = True
        return out

    def _change_weights(self, func: Any, args: Any, kwargs: dict[str, Any], weights: Weights, x: Tensor) -> Any:
        """An operation on the weights ``x``: they are still weights if it is known what it does to them."""
        if weights.softmax is None:
            out = func(*args, **kwargs)
            # What is made of them element by element are still weights of an unknown kind.
            if isinstance(out, Tensor) and out.shape == x.shape and out.is_floating_point():
                self._note_weights(out, None, None, weights.key_axis)
            return out
        scores = self._scores_of(weights, x)
        before = x.clone() if func in ZEROS and changes_in_place(func, kwargs) else x
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            # Without a counter of changes, weights that something wrote to are forgotten here.
            if changes_in_place(func, kwargs):
                self._weights.pop(x, None)
            return out
        if out is x:
            del self._weights[x]
        axis = weights.key_axis
        if func in LAYOUT_OPERATIONS and first_tensor(args) is x:
            followed = follow_axis(func, args, kwargs, out, weights.key_axis)
            if followed is None:
                return out
            axis = followed
            scores = func(*[scores if arg is x else arg for arg in args], **kwargs)
        elif func in ZEROS and out.shape == scores.shape:
            zeroed = (out == 0) & (before != 0)
            is_same = (out == before) | zeroed | before.isnan()
            # Zeros may only empty whole rows: the weights that remain in a row must still sum to 1.
            has_zeroed = zeroed.any(axis, keepdim=True)
            if not bool(is_same.all()) or bool((has_zeroed & (out != 0).any(axis, keepdim=True)).any()):
                self._note_weights(out, None, None, axis)
                return out
            scores = scores.detach().masked_fill(zeroed, -math.inf)
        elif func not in SAME_WEIGHTS or first_tensor(args) is not x:
            if out.shape == x.shape:
                self._note_weights(out, None, None, axis)
            return out
        self._note_weights(out, weights.softmax, scores, axis)
        return out

    def _scores_of(self, weights: Weights, w: Tensor) -> Tensor:
        """The logarithms of the weights ``w``, up to a constant per row."""
        if weights.scores is None or weights.scores_version != change_count(weights.scores):
            return w.detach().float().log()
        return weights.scores

    def _observe(self, weights: Weights, w: Tensor, values: ValueProduct, out: Tensor, factors: list[Tensor]) -> Tensor:
        """Call the observers at the product of the weights ``w`` with values.

        - ``factors``: tensors whose first axis may be joined of batch entries and heads.
        """
        softmax = weights.softmax
        shape = self._batch_and_heads(values, factors)
        if softmax is None or (shape is None and self._is_observed()):
            return out
        softmax.used = True
        # No observer selects this module.
        if shape is None or not self._is_observed():
            return out
        observers = self._observers()
        # The same weights may be multiplied with several tensors of values. They are measured once.
        place = (w.data_ptr(), tuple(w.shape), w.stride())
        was_measured = place in softmax.measured
        softmax.measured.add(place)
        scores = self._scores_of(weights, w).detach().expand(w.shape).permute(values.weights_order)
        scores = scores.expand(*values.lead, values.n, values.m).reshape(*shape, values.n, values.m)
        if values.m:
            # So far below the largest score of its row, a weight is 0 in every dtype: the key is hidden.
            scores = torch.where(scores < scores.amax(-1, keepdim=True) - HIDDEN_RANGE, -math.inf, scores)
        v = values.v.expand(*values.lead, *values.v.shape[-2:]).reshape(*shape, *values.v.shape[-2:])
        heads_out = values.heads_first(out).reshape(*shape, values.n, v.shape[-1])
        replaced = observe_weights(observers, scores, v, heads_out, measure=not was_measured)
        if replaced is heads_out:
            return out
        return values.as_model(replaced)

    def _batch_and_heads(self, values: ValueProduct, factors: list[Tensor]) -> tuple[int, int] | None:
        """The numbers of batch entries and of heads of the weights; None if nothing says which axes they are.

        - ``factors``: tensors whose first axis may be joined of both.
        """
        lead = values.lead
        total = math.prod(lead)
        if not lead:
            return 1, 1
        if len(lead) == 2:
            # Heads may come first, or have no axis. What both axes could be is read in the usual order.
            named = self._running.named_head_counts()
            return lead if not named or lead[1] in named else None
        if len(lead) > 2:
            # Blocks of one sequence that see other blocks, too, are no batch entries: their keys have other positions.
            if values.n != values.m or not self._running.has_head_count(lead[-1]):
                return None
            if lead[-1] in lead[:-1]:
                return None
            return math.prod(lead[:-1]), lead[-1]
        for x in factors:
            joined = self._joined.first_axis(x)
            if joined is not None and math.prod(joined) == total:
                return joined if self._running.are_batch_and_heads(*joined) else None
        count = self._running.head_count(total)
        # Nothing says which of both comes first, unless there is only one of them.
        if count is None or 1 not in (count, total // count):
            return None
        return total // count, count

    def _note_other_weights(self) -> None:
        if self._running.innermost is not None:
            self._unseen[self._running.innermost.path] = None
