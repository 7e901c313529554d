"""Where the parts of a model are: its blocks, their attention, and what a module adds to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

TOKENS = "token embedding"
POSITIONS = "position embedding"
EMBEDDING = "embedding"
HEAD = "head"
FEED_FORWARD = "feed-forward"
CONSTANT = "constant"
OTHER = "other"
UNSEEN = "unseen"

# Names of layers inside blocks that read other tokens and are no softmax attention.
MIXER_WORDS = ("attn", "attention", "mamba", "mixer", "ssm", "conv", "recurrent", "temporal", "rwkv", "delta")


class ModelBlocks:
    """The blocks of a model, from the paths at which it computes attention."""

    def __init__(self, model: nn.Module, attention: list[str]) -> None:
        self.attention = attention
        self.blocks: set[str] = set()
        for path in attention:
            self.blocks.update(_blocks_like(model, path))

    def in_block(self, path: str) -> bool:
        """Whether a module is a block, or a part of one."""
        return any(is_inside(path, block) for block in self.blocks)

    def in_attention(self, path: str) -> bool:
        """Whether a module is a part of an attention module, which is not a whole block."""
        return any(is_inside(path, inner) for inner in self.attention if inner not in self.blocks)

    def has_attention(self, path: str) -> bool:
        """Whether a module computes attention, or has a part that does."""
        return any(is_inside(inner, path) for inner in self.attention)

    def label(self, path: str) -> str:
        """The outermost module around a path, inside its block, that has no attention: a feed-forward network."""
        label = path
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            outer = ".".join(parts[:end])
            if not self.in_block(outer) or outer in self.blocks or self.has_attention(outer):
                break
            label = outer
        return label

    def stack_of(self, path: str) -> str:
        """The list of blocks that a module belongs to; its own path if it is in no block."""
        for block in self.blocks:
            if is_inside(path, block):
                return block.rpartition(".")[0]
        return path

    def kind(self, label: str) -> str:
        """What a module is that adds to the stream something that is not linear in it."""
        if not self.in_block(label) or self.in_attention(label):
            return UNSEEN
        name = label.rpartition(".")[2].lower()
        if any(word in name for word in MIXER_WORDS):
            return OTHER
        return FEED_FORWARD


def is_inside(path: str, outer: str) -> bool:
    """Whether a module is another one, or a part of it."""
    return not outer or path == outer or path.startswith(outer + ".")


def names_positions(path: str) -> bool:
    return "pos" in path.lower() or path.endswith("wpe")


def _blocks_like(model: nn.Module, path: str) -> list[str]:
    """The paths of the block around an attention module, and of the blocks beside it.

    The block is the outermost module around it that is in a list of modules; other modules of the list are blocks, too,
    even if they have no attention. If there is no list, the block is the module that has the attention.
    """
    parts = path.split(".")
    for kinds in ((nn.ModuleList, nn.Sequential), (nn.ModuleDict,)):
        for end in range(1, len(parts) + 1):
            outer = parts[: end - 1]
            container = model.get_submodule(".".join(outer))
            if isinstance(container, nn.ModuleList):
                lists = [".".join(outer)]
                # XLM has a list of attention modules, and another one of feed-forward networks.
                for name, sibling in model.get_submodule(".".join(outer[:-1])).named_children():
                    if isinstance(sibling, nn.ModuleList) and len(sibling) == len(container):
                        lists.append(".".join([*outer[:-1], name]))
                return [f"{path}.{number}".lstrip(".") for path in lists for number in range(len(container))]
            if isinstance(container, kinds):
                return [".".join(parts[:end])]
    return [".".join(parts[:-1]) or path]


@contextmanager
def exact_and_frozen(model: nn.Module) -> Iterator[None]:
    """Within the context, the model computes in at least float32 and in eval mode, and no parameter needs gradients.

    In 16 bits, rounding alone would be a larger part of a logit than most heads.
    """
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    short = []
    for tensor in (*model.parameters(), *model.buffers()):
        # Quantised weights are subclasses, and keep their dtype.
        if type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in (torch.bfloat16, torch.float16):
            short.append((tensor, tensor.data))
    training = model.training
    model.eval()
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        for tensor, data in short:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in short:
            tensor.data = data
        for parameter in learned:
            parameter.requires_grad_(True)
        model.train(training)
