"""Two aids that let induction heads form within minutes: repeated passages, and tied initial weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.nn import MultiHeadAttention

# The mean of q·k/√d_k before training. The weights contribute TOKEN_SCORE between equal tokens and 0 between different
# ones. The biases contribute POSITION_SCORE at offset 0, and slowly less at larger distances.
TOKEN_SCORE = 1.2
POSITION_SCORE = 2.0


def repeat_passage(ids: Tensor, min_length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Copy a random block of each row of ``ids [B, n]`` to a later place: ``… block … block …``.

    The block has ``min_length`` … n/2 tokens. It begins anywhere, and the copy begins anywhere after its end, so a
    head that attends by position alone cannot find it.

    Returns the new ids, and a mask ``[B, n]`` of the tokens that can be predicted: the copy without its first token.
    """
    count, n = ids.shape

    def draw_integers(low: Tensor | int, high: Tensor | int) -> Tensor:
        """Draw one integer per row, from low to high."""
        span = torch.as_tensor(high) - low + 1
        return low + (torch.rand(count, generator=generator) * span).long()

    length = draw_integers(min_length, n // 2)
    start = draw_integers(0, n - 2 * length)
    copy_start = draw_integers(start + length, n - length)
    position = torch.arange(n)
    inside = position - copy_start.unsqueeze(-1)  # the position within the copy
    in_copy = (inside >= 0) & (inside < length.unsqueeze(-1))
    source = torch.where(in_copy, start.unsqueeze(-1) + inside, position)
    return ids.gather(1, source), in_copy & (inside > 0)


def draw_initial_biases(model: nn.Module) -> None:
    """Draw ``b_q, b_k ~ N(0, 1)`` in every attention layer that has biases; leave everything else unchanged.

    A head that attends by position alone needs a part of q and k that is the same for all tokens, so that the rotation
    can act on it: the biases. If b_q and b_k both started at 0, both gradients would be 0.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and module.q_proj.bias is not None:
            nn.init.normal_(module.q_proj.bias)
            nn.init.normal_(module.k_proj.bias)


@torch.no_grad()
def tie_initial_weights(model: nn.Module) -> None:
    """Start every head with ``W_k = W_q, b_k = b_q, W_o = W_vᵀ``: it attends weakly to similar and near tokens.

    An induction head needs two steps that are useless alone: a head that copies the previous token, and a head in a
    later layer that finds the copy. With independent initial weights both are so weak that neither is learned for
    millions of tokens. Here the products start as E[W_qᵀ W_k] ∝ 1 and E[W_o W_v] ∝ 1, so that a later layer can find
    what an earlier one copies. Rotary positions rotate b_q·b_k, which is largest at offset 0, so near tokens get a
    little more weight. The attention maps stay close to uniform.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            root = module.d_key**0.5
            nn.init.normal_(module.q_proj.weight, std=(TOKEN_SCORE / root / module.d_in) ** 0.5)
            module.k_proj.weight.copy_(module.q_proj.weight)
            module.out_proj.weight.copy_(module.v_proj.weight.T)
            if module.q_proj.bias is not None:
                nn.init.normal_(module.q_proj.bias, std=(POSITION_SCORE / root) ** 0.5)
                module.k_proj.bias.copy_(module.q_proj.bias)
