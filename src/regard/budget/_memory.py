"""Bytes of weights, gradients, optimizer state, activations and caches, and the peak of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy

from regard._errors import RegardError
from regard.budget._attention_parts import Attention
from regard.budget._model import Lengths, Model, PlacedPart, Stack
from regard.budget._parts import Embedding, Linear, Norm, largest
from regard.budget._symbols import Number

# Bytes per value. Quantized weights have one float16 scale for each group of 128.
QUANTIZATION_GROUP = 128
BYTES: dict[str, int | sympy.Rational] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1 + sympy.Rational(2, QUANTIZATION_GROUP),
    "int4": sympy.Rational(1, 2) + sympy.Rational(2, QUANTIZATION_GROUP),
}
# Dtypes of products. Quantized weights are converted to one of them before a product.
COMPUTE_DTYPES = ("float64", "float32", "bfloat16", "float16")
ALIASES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}

# Numbers per parameter that an optimizer stores, in the dtype of the weights. adam32 is for mixed-precision training:
# it stores its moments and a copy of the weights in float32.
OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adam32": 3}


@dataclass(frozen=True)
class Memory:
    """Bytes that a step needs, by purpose.

    - `weights`, `gradients`, `optimizer`: parameters, their gradients, the optimizer's state.
    - `activations`: values saved for the backward pass.
    - `checkpointed_activations`: the same with activation checkpointing, which saves only the inputs of the blocks and
      computes the blocks again.
    - `attention_weights`: the attention weights of all layers and heads. Plain attention stores them in training.
    - `cache`: keys and values of all layers, if the model generates.
    - `peak`: the most bytes that a step allocates at one time, in addition to what was allocated before it. In
      training: activations, gradients and the temporary values of the worst moment. In inference: what the worst layer
      needs.
    - `checkpointed_peak`: the peak with activation checkpointing; None in inference.
    - `total`: in training weights, optimizer state and peak (which includes gradients); in inference weights, cache and
      peak.

    >>> model = regard.budget.decoder(768, heads=12, layers=12, vocab=50257)
    >>> memory = regard.budget.plan(model, tokens=1024, training=True).memory
    >>> memory.weights == 4 * model.parameters, memory.optimizer == 2 * memory.weights  # Adam: two numbers per weight
    (True, True)
    >>> memory.attention_weights == 12 * 12 * 1024**2 * 4  # layers × heads × n × n, which tiled attention never stores
    True
    """

    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    checkpointed_activations: Number
    attention_weights: Number
    cache: Number
    peak: Number
    checkpointed_peak: Number | None
    total: Number


def dtype_name(dtype: object) -> str:
    """Return the full name of a dtype: ``"bf16"`` and ``torch.bfloat16`` become ``"bfloat16"``; others stay."""
    name = str(dtype).removeprefix("torch.")
    return ALIASES.get(name, name)


def bytes_per_value(dtype: str) -> int | sympy.Rational:
    """Bytes of one value of this dtype."""
    if dtype not in BYTES:
        raise RegardError(f"weights must be one of {', '.join(BYTES)}, got {dtype!r}")
    return BYTES[dtype]


def optimizer_bytes(optimizer: str, size: Number) -> Number:
    """Bytes of the optimizer's state per parameter, for weights of `size` bytes."""
    if optimizer == "adam32":
        size = 4
    return OPTIMIZERS[optimizer] * size


def count_memory(
    model: Model,
    lengths: Lengths,
    *,
    dtype: str = "float32",
    weights: str | None = None,
    optimizer: str = "adam",
    training: bool = False,
) -> Memory:
    """Count the memory of one training step or forward pass.

    - `dtype`: the dtype of products and of stored activations.
    - `weights`: dtype of the weights if it differs (int8, int4); inference only.
    - `optimizer`: one of `OPTIMIZERS`.
    """
    if dtype not in COMPUTE_DTYPES:
        raise RegardError(f"dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {dtype!r}")
    if optimizer not in OPTIMIZERS:
        raise RegardError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if training and weights not in (None, dtype):
        raise RegardError(f"weights in {weights} cannot be trained with dtype {dtype}; leave weights out")

    size = BYTES[dtype]
    parameters = model.parameters
    weight_bytes = parameters * bytes_per_value(dtype if weights is None else weights)
    step_peak = peak_bytes(model, lengths, size, training=training)
    cache = size * cache_elements(model, lengths)

    # Only training has gradients and optimizer state; only inference has a cache.
    gradients: Number = 0
    optimizer_state: Number = 0
    checkpointed_peak: Number | None = None
    total_bytes = weight_bytes + step_peak
    if training:
        gradients = parameters * size
        optimizer_state = parameters * optimizer_bytes(optimizer, size)
        checkpointed_peak = peak_bytes(model, lengths, size, training=True, checkpoint=True)
        total_bytes = total_bytes + optimizer_state
    else:
        total_bytes = total_bytes + cache

    # Plain attention computes its weights in float32 or wider.
    attention_weights: Number = 0
    for placed, part in model.attention_parts:
        width = size if part.tiled else largest(size, 4)
        elements = placed.repeats * part.weight_elements(placed.call(lengths))
        attention_weights = attention_weights + width * elements

    return Memory(
        weights=weight_bytes,
        gradients=gradients,
        optimizer=optimizer_state,
        activations=saved_activations(model, lengths, size),
        checkpointed_activations=saved_activations(model, lengths, size, checkpoint=True),
        attention_weights=attention_weights,
        cache=cache,
        peak=step_peak,
        checkpointed_peak=checkpointed_peak,
        total=total_bytes,
    )


def cache_elements(model: Model, lengths: Lengths) -> Number:
    """The number of elements of all layers' keys and values after the call; 0 if the model does not generate."""
    if not model.generates:
        return 0
    before = lengths.cached or 0
    elements: Number = 0
    for placed, part in model.attention_parts:
        # An encoder has no cache; cross-attention caches the keys of the source.
        if placed.rows == "n":
            keys = before + lengths.n if placed.keys == "n" else placed.call(lengths).keys
            elements = elements + placed.repeats * part.cache_elements(lengths.batch, keys)
    return elements


def saved_activations(model: Model, lengths: Lengths, size: Number = 4, *, checkpoint: bool = False) -> Number:
    """Bytes of activations that a forward pass saves for the backward pass, for values of `size` bytes.

    - `checkpoint`: save only the inputs of the blocks, and compute the rest again.
    """
    return sum(_saved_in_stack(stack, model, lengths, size, checkpoint) for stack in model.stacks)


def saved_by_part(placed: PlacedPart, lengths: Lengths, size: Number) -> Number:
    """Bytes that one repeat of a part saves for the backward pass."""
    return sum(placed.part.saved_bytes(placed.call(lengths), size).values())


def peak_bytes(model: Model, lengths: Lengths, size: Number, *, training: bool, checkpoint: bool = False) -> Number:
    """The most bytes that a step allocates at one time, in addition to what was allocated before it."""
    if training:
        return largest(*_training_moments(model, lengths, size, checkpoint))
    return largest(*_inference_moments(model, lengths, size))


def _inference_moments(model: Model, lengths: Lengths, size: Number) -> Iterator[Number]:
    """Bytes held at each part of a forward pass without gradients.

    While a block runs, its caller holds the input of the stack and the input of the block. Without an embedding, the
    input of the stack is the model's own input, which was allocated before the call and does not count.
    """
    context: Number = 0  # the encoder's output, which the decoder reads
    for stack in model.stacks:
        stream = _stream_bytes(stack, model, lengths, size)
        stack_input = stream if stack.before else 0
        for placed in stack.before:
            yield context + placed.part.forward_peak(placed.call(lengths), size)

        parts = [placed for placed in stack.blocks if not isinstance(placed.part, Norm)]
        for index, placed in enumerate(parts):
            held = context + stack_input
            if stack.layers != 1:
                held = held + stream  # the block's input, which is not the stack's input
            if index > 0:
                held = held + stream  # the residual sum
            if stack.order == "pre":
                held = held + stream  # the output of the norm
            yield held + placed.part.forward_peak(placed.call(lengths), size)

        for placed in stack.after:
            # A classifier of the first token holds all tokens, because its input is a view of them.
            held = context + stream
            if not isinstance(placed.part, Linear):
                held = held + stack_input
            yield held + placed.part.forward_peak(placed.call(lengths), size)
        context = context + stream


def _training_moments(model: Model, lengths: Lengths, size: Number, checkpoint: bool) -> Iterator[Number]:
    """Bytes held at the loss, and at each part of the backward pass of the first and the last block of each stack.

    From block to block the saved activations shrink and the gradients grow, so the worst moment is in the first or in
    the last block.
    """
    allocated = [_allocated_in_stack(stack, model, lengths, size, checkpoint) for stack in model.stacks]
    saved = sum(allocated)  # activations of the stacks whose backward pass has not started
    finished: Number = 0  # logits, and gradients that are complete
    if model.vocab is not None:
        # The logits, which the caller holds to the end, their log-softmax, and the gradients of both.
        finished = size * model.stacks[-1].after[-1].call(lengths).tokens * model.vocab
        yield saved + 4 * finished

    # Which parts have already produced a gradient of the embedding's table.
    tied_head = any(_tied_elements(placed) != 0 for placed in model)
    looked_up = False
    for stack, own in zip(reversed(model.stacks), reversed(allocated), strict=True):
        saved = saved - own
        stream = _stream_bytes(stack, model, lengths, size)
        for placed in reversed(stack.after):
            finished = finished + size * (placed.parameters + _tied_elements(placed))
            own = own - saved_by_part(placed, lengths, size)  # released after its backward pass
            yield saved + own + finished + placed.part.backward_peak(placed.call(lengths), size)
        for parts in _block_kinds(stack):
            yield from _block_moments(stack, parts, saved + own, finished, lengths, size, stream, checkpoint)
        finished = finished + size * stack.block_parameters

        for placed in reversed(stack.before):
            part = placed.part
            if not isinstance(part, Embedding):
                finished = finished + size * placed.parameters
                yield saved + finished + stream
                continue
            # The gradient of a look-up is as large as the table. With a tied head there are three such tensors: the
            # head's gradient, this gradient and their sum. The gradient of a second look-up is added in place.
            table = size * part.rows * part.d
            if looked_up:
                yield saved + finished + stream + table
            elif tied_head:
                yield saved + finished + stream + 2 * table
            else:
                yield saved + finished + stream + table
                finished = finished + table
            looked_up = True  # source and target share one table


def _block_moments(
    stack: Stack,
    parts: tuple[PlacedPart, ...],
    saved: Number,
    finished: Number,
    lengths: Lengths,
    size: Number,
    stream: Number,
    checkpoint: bool,
) -> Iterator[Number]:
    """Bytes held at each part of the backward pass of the last block, then of the first block.

    - `saved`: activations of this stack's blocks and of the stacks before it.
    - `finished`: logits and gradients of what came after the blocks.
    """
    inside = [saved_by_part(placed, lengths, size) for placed in parts]
    gradients = [size * placed.part.parameters for placed in parts]
    all_blocks = _saved_in_blocks(stack, lengths, size)
    other_gradients = size * stack.block_parameters - sum(gradients)
    for first_block in (False, True):
        outside = saved
        ready = finished
        if first_block:
            ready = ready + other_gradients
        if checkpoint and first_block:
            # Only the inputs of blocks are saved, and one input is left; this block has just been computed again.
            outside = outside - stack.layers * stream + stream
        elif not checkpoint and first_block:
            outside = outside - all_blocks
        elif not checkpoint:
            outside = outside - sum(inside)

        # Parts after this one have produced their gradients; parts before it still hold their activations.
        for index in reversed(range(len(parts))):
            own = sum(inside[:index]) + parts[index].part.backward_peak(parts[index].call(lengths), size)
            yield outside + ready + sum(gradients[index:]) + stream + own
        if stack.layers == 1:  # the last block is also the first
            return


def _block_kinds(stack: Stack) -> Iterator[tuple[PlacedPart, ...]]:
    """Yield the parts of one block for each kind of block; a stack may have blocks with and without a window."""
    starts = [index for index, placed in enumerate(stack.blocks) if placed.name == stack.blocks[0].name]
    for start, end in zip(starts, [*starts[1:], len(stack.blocks)], strict=True):
        yield stack.blocks[start:end]


def _saved_in_stack(stack: Stack, model: Model, lengths: Lengths, size: Number, checkpoint: bool) -> Number:
    saved = sum(saved_by_part(placed, lengths, size) for placed in (*stack.before, *stack.after))
    saved = saved + _shared_saved_bytes(stack, lengths, size)
    if checkpoint:
        return saved + stack.layers * _stream_bytes(stack, model, lengths, size)
    return saved + _saved_in_blocks(stack, lengths, size)


def _saved_in_blocks(stack: Stack, lengths: Lengths, size: Number) -> Number:
    return sum(placed.repeats * saved_by_part(placed, lengths, size) for placed in stack.blocks)


def _allocated_in_stack(stack: Stack, model: Model, lengths: Lengths, size: Number, checkpoint: bool) -> Number:
    """Saved bytes, without the model's own input and context, which were allocated before the step."""
    allocated = _saved_in_stack(stack, model, lengths, size, checkpoint)
    # The first norm of a pre-norm block does not save the input. Attention and checkpointing do.
    if not stack.before and (stack.order == "post" or checkpoint):
        allocated = allocated - _stream_bytes(stack, model, lengths, size)
    if len(model.stacks) == 1:
        allocated = allocated - _shared_saved_bytes(stack, lengths, size)
    return allocated


def _shared_saved_bytes(stack: Stack, lengths: Lengths, size: Number) -> Number:
    return sum(placed.part.shared_saved_bytes(placed.call(lengths), size) for placed in stack.blocks)


def _stream_bytes(stack: Stack, model: Model, lengths: Lengths, size: Number) -> Number:
    """Bytes of one vector per token."""
    # An image tower may have another width than the model.
    widths = [placed.part.d_in for placed in stack.blocks if isinstance(placed.part, Attention)]
    d = widths[0] if widths else model.d
    return size * stack.blocks[0].call(lengths).tokens * d


def _tied_elements(placed: PlacedPart) -> Number:
    """Elements of an output matrix that is tied to the embedding; 0 for other parts.

    The embedding counts these parameters, but the output layer is the first that produces their gradient.
    """
    part = placed.part
    if isinstance(part, Linear) and part.tied:
        return part.d_in * part.d_out
    return 0
