"""What brings heads, in minutes, to look up what followed before: passages said again, and heads that begin alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.nn import MultiHeadAttention

__all__ = ["begin_alike", "begin_apart", "said_again"]

# The mean of q·k/√d_k at the beginning: of a token with itself (of others it is 0), and of a place with itself (it
# falls with the distance, slowly).
TOKENS, PLACES = 1.2, 2.0


def said_again(ids: Tensor, shortest: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """``… block … block …`` in each row of ``[B, n]``, and which ids can be known: the copy without its first one.

    The block has ``shortest`` … n/2 tokens, and it and its copy begin anywhere (the copy after the block's end): heads
    that go by position alone cannot find it.
    """
    count, n = ids.shape

    def between(low: Tensor | int, high: Tensor | int) -> Tensor:
        """A whole number a row, from low to high."""
        span = torch.as_tensor(high) - low + 1
        return low + (torch.rand(count, generator=draw) * span).long()

    block = between(shortest, n // 2)
    start = between(0, n - 2 * block)
    again = between(start + block, n - block)
    at = torch.arange(n)
    since = at - again.unsqueeze(-1)
    inside = (since >= 0) & (since < block.unsqueeze(-1))
    return ids.gather(1, torch.where(inside, start.unsqueeze(-1) + since, at)), inside & (since > 0)


def begin_apart(model: nn.Module) -> None:
    """``b_q, b_k ~ N(0, 1)``, the rest as it is: drawn apart.

    A head that goes by position alone needs something to turn that no token changes: biases. If those of q and k both
    began at 0, neither would have a gradient through the other.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and module.q_proj.bias is not None:
            nn.init.normal_(module.q_proj.bias)
            nn.init.normal_(module.k_proj.bias)


@torch.no_grad()
def begin_alike(model: nn.Module) -> None:
    """``W_k = W_q, b_k = b_q, W_o = W_vᵀ``: a head begins by looking, faintly, at what is alike and near, and moves it.

    An induction head needs two steps that are of no use alone: a head that brings the token before, and one in a later
    layer that finds it. From weights drawn apart both are so faint that nothing is gained by either for millions of
    tokens. Here products begin as E[W_qᵀ W_k] ∝ 1 and E[W_o W_v] ∝ 1, so that what one layer moves the next can find,
    and rotary positions turn b_q·b_k, largest at offset 0: near tokens weigh a little more. Maps stay near uniform.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            root = module.d_key**0.5
            nn.init.normal_(module.q_proj.weight, std=(TOKENS / root / module.d_in) ** 0.5)
            module.k_proj.weight.copy_(module.q_proj.weight)
            module.out_proj.weight.copy_(module.v_proj.weight.T)
            if module.q_proj.bias is not None:
                nn.init.normal_(module.q_proj.bias, std=(PLACES / root) ** 0.5)
                module.k_proj.bias.copy_(module.q_proj.bias)
