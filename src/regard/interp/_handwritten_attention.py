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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from regard._hooks import Observer, is_own_computation, observe_weights, run_attention
from regard.interp._active_observers import ActiveObservers, note_unseen
from regard.interp._axis_tracking import LAYOUT_OPERATIONS, JoinedAxes, follow_axis
from regard.interp._deferred_results import with_numbers
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
from regard.interp._head_outputs import head_outputs
from regard.interp._matrix_products import EINSUMS, MATMULS, MatrixProduct, ValueProduct, matrix_product, value_product
from regard.interp._score_parts import Part
from regard.interp._weight_layout import batch_and_heads


class HandwrittenAttention:
    """Follows the torch functions that the models of these observers call."""

    def __init__(self, active: ActiveObservers) -> None:
        self._active = active
        # The deferred scores of this forward pass, and whether there were any.
        self._deferred: list[weakref.ref[DeferredScores]] = []
        self._has_deferred = False
        self._scores = WeakTensorKeyDictionary()
        self._joined = JoinedAxes()
        self._weights = WeakTensorKeyDictionary()
        # The softmaxes of this forward pass.
        self._softmaxes: list[Softmax] = []

    def leave(self, observer: Observer) -> None:
        """Note what one observer could not see, while the models of others still run."""
        for softmax in self._softmaxes:
            own = [(other, path) for other, path in softmax.paths if other is observer]
            if softmax.exists and not softmax.used:
                note_unseen(own)
            softmax.paths = [pair for pair in softmax.paths if pair not in own]

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a torch function for the model, and follow what it does."""
        # The reference backend is no model.
        if is_own_computation():
            return func(*args, **kwargs)
        if changes_in_place(func, kwargs):
            self._before_change(args, kwargs)
        if self._has_deferred and func not in QUESTIONS and has_deferred(args, kwargs):
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
                note_unseen(softmax.paths)
        self._softmaxes.clear()

    def compute_deferred(self, result: Any = None) -> Any:
        """At the end of a forward pass, compute all deferred scores that are still referenced.

        ``result`` comes back with their numbers in it.
        """
        has_deferred = self._has_deferred
        alive = self._alive()
        # Nothing of this forward pass stays, whatever fails below.
        self._deferred = []
        self._has_deferred = False
        try:
            for x in alive:
                x.dense()
            for x in alive:
                x.release()
        finally:
            self._forget_softmaxes()
        return with_numbers(result) if has_deferred else result

    def _alive(self) -> list[DeferredScores]:
        """The deferred scores that are still referenced."""
        self._deferred = [ref for ref in self._deferred if ref() is not None]
        alive = [ref() for ref in self._deferred]
        return [x for x in alive if x is not None]

    def _before_change(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Use the numbers that an operation in place is about to overwrite, and forget what is then not true."""
        changed = tree_leaves(kwargs["out"]) if "out" in kwargs else tree_leaves(args[:1])
        for target in changed:
            if not isinstance(target, Tensor) or isinstance(target, DeferredScores):
                continue
            if self._has_deferred:
                self._compute_before_change(target)
            if change_count(target) is None:
                self._forget_shared(target)
                head_outputs.note_change(target)

    def _compute_before_change(self, target: Tensor) -> None:
        alive = self._alive()
        for x in alive:
            if not x.is_computed:
                if any(may_share_memory(read, target) for read in x.reads):
                    x.dense()
            elif may_share_memory(x, target):
                x.compute_what_depends()
        for x in alive:
            if x.is_computed and may_share_memory(x, target):
                x.mark_changed()

    def _forget_shared(self, target: Tensor) -> None:
        """Forget what is known about tensors that share memory with one whose changes torch does not count."""
        for w, weights in list(self._weights.items()):
            if w is not target and may_share_memory(w, target):
                del self._weights[w]
            elif weights.scores is not None and may_share_memory(weights.scores, target):
                self._weights[w] = replace(weights, scores=None)

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
                if func in SOFTMAXES and self._active.paths():
                    self._note_softmax(result)
                # An operation in place returns what it was given.
                if result is not args[0]:
                    self._deferred.append(weakref.ref(result))
                return result
        args, kwargs = tree_map_only(DeferredScores, self._numbers, (args, kwargs))
        return self.call(func, args, kwargs)

    def _note_softmax(self, weights: DeferredScores) -> None:
        softmax = Softmax(self._active.paths(), exists=False)
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
        if x.is_released:
            return numbers
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
        values = value_product(product, weights is product.a, weights.ndim - 1, self._head_counts)
        if values is None or isinstance(values.v, DeferredScores) or values.v.dtype != weights.dtype:
            return None
        if values.lead != weights.shape[:-2] or values.weights_order != tuple(range(weights.ndim)):
            return None
        scores = weights.scores
        factors = [product.a, product.b, *scores.factors]
        shape = self._batch_and_heads(values, factors, [values.v, scores.q.tensor, scores.k.tensor])
        if shape is None or (scores.masks and shape != values.lead):
            return None
        if scores.needs_gradients() or torch.is_autocast_enabled(scores.q.tensor.device.type):
            return None
        options = scores.attention_options(*shape)
        if options is None or not self._active.is_selected():
            return None
        observers = self._active.reached()
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
        result = values.as_model(out.to(weights.dtype))
        head_outputs.pass_on(out, result)
        return result

    def _multiply(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        product = matrix_product(func, args, kwargs)
        if product is None:
            return func(*args, **kwargs)
        for factor, is_first in ((product.a, True), (product.b, False)):
            weights = self._known_weights(factor)
            if weights is None:
                continue
            values = value_product(product, is_first, weights.key_axis, self._head_counts)
            if values is None:
                continue
            out = func(*args, **kwargs)
            other = product.b if is_first else product.a
            if weights.softmax is None or self._known_weights(other) is not None:
                # Products of weights with weights are parts of something else (Nyströmformer).
                self._active.note_unseen()
                if out.ndim >= 3:
                    self._note_weights(out, None, None, out.ndim - 1)
                return out
            return self._observe(weights, factor, values, out, [product.a, product.b])
        is_learned = _is_learned(product.a) or _is_learned(product.b)
        if is_learned or len(product.out_axes) < 3 or not product.a.is_floating_point():
            return func(*args, **kwargs)
        if self._may_defer(product):
            reads = tuple(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            deferred = defer_product(product, lambda: func(*args, **kwargs), reads)
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
        return self._active.is_selected()

    def _head_counts(self) -> list[int]:
        running = self._active.running()
        return [] if running is None else running.named_head_counts()

    def _batch_and_heads(
        self, values: ValueProduct, factors: list[Tensor], parts: list[Tensor]
    ) -> tuple[int, int] | None:
        running = self._active.running()
        if running is None:
            return None
        return batch_and_heads(values, running, self._joined, factors=factors, parts=parts)

    def _change_scores(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """An operation on scores: it makes weights, or other scores, or something else."""
        out = func(*args, **kwargs)
        if func is Tensor.__setitem__ and args[0].ndim >= 3:
            # Scores of blocks are collected in one tensor.
            self._scores[args[0]] = True
        if not isinstance(out, Tensor) or out.ndim < 3 or not out.is_floating_point() or func in NO_SCORES:
            return out
        if func in SOFTMAXES and self._active.paths():
            axis = softmax_axis(args, kwargs, out.ndim)
            if axis is not None:
                softmax = Softmax(self._active.paths())
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
        if softmax is None:
            return out
        shape = self._batch_and_heads(values, factors, [values.v])
        if shape is None and self._active.is_selected():
            return out
        softmax.used = True
        # Attention was reached here, also if no observer selects this module.
        observers = self._active.reached()
        if shape is None or not observers:
            return out
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

        def model_weights() -> Tensor:
            ordered = w.permute(values.weights_order).expand(*values.lead, values.n, values.m)
            return ordered.reshape(*shape, values.n, values.m)

        replaced = observe_weights(observers, scores, v, heads_out, measure=not was_measured, weights=model_weights)
        result = out
        if replaced is not heads_out:
            result = values.as_model(replaced)
        head_outputs.pass_on(replaced, result)
        return result


def _is_learned(x: Tensor) -> bool:
    """Whether a factor is a parameter, or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
