"""Parts of Llama's relatives that ``regard.nn`` does not have: norms, blocks with more norms, capped logits.

Each is a class of its own. The native decode step takes exactly the classes of ``regard.nn``, so it leaves these to the
code here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels.linear_norm_rope import rms_norm
from regard.nn import Block, FeedForward, MultiHeadAttention, RMSNorm
from regard.nn._norm import NormFactory
from regard.nn._stack import TokenEmbedding


class ShiftedRMSNorm(RMSNorm):
    """``y = (1 + γ) ⊙ x / √(mean(x²) + ε)``, as Gemma has it: γ starts at 0.

    >>> ShiftedRMSNorm(2, eps=0.0)(torch.tensor([3.0, -3.0]))
    tensor([ 1., -1.], grad_fn=<MulBackward0>)
    """

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__(d, eps)
        self.weight = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        """``x [*, D] → y [*, D]``, in x's dtype."""
        # 1 + γ needs more bits than γ: in bfloat16 the sum would lose most of them.
        shifted = 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return rms_norm(x, shifted, self.eps)


class JointRMSNorm(RMSNorm):
    """RMSNorm of the queries or keys of all heads together, as OLMo 2 has it: one mean square per token.

    >>> JointRMSNorm(3, 5)(torch.randn(2, 3, 7, 5)).shape
    torch.Size([2, 3, 7, 5])
    """

    def __init__(self, heads: int, d_key: int, eps: float = 1e-6) -> None:
        super().__init__(heads * d_key, eps)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """``x [*B, H, n, D] → y [*B, H, n, D]``, in x's dtype."""
        joined = x.transpose(-3, -2).flatten(-2)  # [*B, n, H·D]
        return super().forward(joined).unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class NormAfterBlock(Block):
    """``x ← x + norm(f(x))``, as OLMo 2 has it: the norm is on the output of each sublayer, before the sum."""

    def _sublayer(self, x: Tensor, norm: nn.Module, f: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self._drop(norm(f(x)))

    def extra_repr(self) -> str:
        return "norms after sublayers"


class NormAroundBlock(Block):
    """``x ← x + norm_out(f(norm(x)))``, as Gemma 2 has it: norms before and after each sublayer."""

    def __init__(
        self, attention: MultiHeadAttention, feedforward: FeedForward, *, norm: NormFactory, dropout: float = 0.0
    ) -> None:
        super().__init__(attention, feedforward, norm=norm, dropout=dropout)
        self.attention_out_norm = norm(self.d)
        self.feedforward_out_norm = norm(self.d)

    def _sublayer(self, x: Tensor, norm: nn.Module, f: Callable[[Tensor], Tensor]) -> Tensor:
        out_norm = self.feedforward_out_norm
        if norm is self.attention_norm:
            out_norm = self.attention_out_norm
        return x + self._drop(out_norm(f(norm(x))))

    def extra_repr(self) -> str:
        return "norms before and after sublayers"


class CappedTokens(TokenEmbedding):
    """A ``TokenEmbedding`` with ``logits → cap · tanh(logits / cap)``, as Gemma 2 has it.

    >>> tokens = CappedTokens(11, 3, cap=0.5)
    >>> bool(tokens.logits(torch.full((1, 3), 1e6)).abs().max() <= 0.5)
    True
    """

    def __init__(self, vocab: int, d: int, *, cap: float, **options: Any) -> None:
        super().__init__(vocab, d, **options)
        self.cap = cap

    def logits(self, x: Tensor) -> Tensor:
        """``x [*B, n, D] → [*B, n, V]``, from −cap to cap; without a head it returns x."""
        logits = super().logits(x)
        if not self.has_head:
            return logits
        return self.cap * torch.tanh(logits / self.cap)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cap={self.cap:g}"


def plain_layer_norm(d: int, eps: float) -> nn.LayerNorm:
    """LayerNorm without weights, as OLMo has it."""
    return nn.LayerNorm(d, eps, elementwise_affine=False)
