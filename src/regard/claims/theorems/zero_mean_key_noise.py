"""Noise of mean 0 on one key: every output moves, the mean output too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import FAILS, Claim, Evidence
from regard.claims.statistics import Interval, mean, slope


class Setting(NamedTuple):
    """Queries ``[n, d]``, keys and values ``[m, d]``, β, and the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: float
    attend: Callable[..., Any]

    def change(self, noise: Tensor) -> Tensor:
        """``[samples, n, d]``: what noise ``[samples, d]`` on key 0 does to the outputs."""
        keys = self.k.repeat(len(noise), 1, 1, 1)
        keys[:, 0, 0] += noise
        after: Tensor = self.attend(
            self.q.expand(len(noise), 1, *self.q.shape),
            keys,
            self.v.expand(len(noise), 1, *self.v.shape),
            scale=self.beta,
        )
        before: Tensor = self.attend(self.q[None, None], self.k[None, None], self.v[None, None], scale=self.beta)
        return (after - before)[:, 0]

    def orders(self) -> tuple[Tensor, Tensor]:
        """``[n, d]`` each: dH/ds and ½ d²H/ds² for s = β k_0ᵀq: a(1 − a)(v_0 − u) and ½a(1 − a)(1 − 2a)(v_0 − u),
        with a the weight of key 0 and u the mean of the other values under the other weights."""
        a = (self.beta * self.q @ self.k.mT).softmax(-1)
        first = a[:, :1]
        apart = self.v[0] - (a[:, 1:] @ self.v[1:]) / (1 - first)
        return first * (1 - first) * apart, first * (1 - first) * (1 - 2 * first) * apart / 2


def exponent(sigmas: Sequence[float], sizes: Sequence[float]) -> Interval:
    """The power of σ by which sizes grow."""
    return slope([math.log(x) for x in sigmas], [math.log(max(x, 1e-300)) for x in sizes])


def against_theory(setting: Setting, noise: Tensor, back: Tensor, sigma: float) -> tuple[float, float, Interval]:
    """Of the query whose mean moves most: E‖ΔH‖² and E ΔH over what the two orders give, and E ΔH with its interval.

    The two quotients are by the same samples' (βσ εᵀq)², not by their expectation: what is left is no chance.
    """
    first, second = setting.orders()
    at = int((second.norm(dim=-1) * setting.q.square().sum(-1)).argmax())
    forth, other = setting.change(sigma * noise)[:, at], setting.change(sigma * back)[:, at]
    squares = (setting.beta * sigma * (noise @ setting.q[at])).square().mean()
    squared = forth.square().sum(-1).mean() / (squares * first[at].square().sum())
    along = (forth + other) / 2 @ (second[at] / second[at].norm())
    return float(squared), float(along.mean() / (squares * second[at].norm())), mean(along)


def controls(found: Evidence, setting: Setting, noise: Tensor, sigmas: Sequence[float]) -> None:
    """Noise with a mean, and noise that no query sees."""
    moved = [float(setting.change(s * (noise + 1)).mean(0).norm()) for s in sigmas]
    found.control(
        "noise with a mean of σ moves the mean as σ²",
        abs(exponent(sigmas, moved).value - 2) < 0.1,
        f"it moves as σ^{exponent(sigmas, moved).value:.3f}",
    )
    basis = torch.linalg.qr(setting.q.mT)[0]
    unseen = float(setting.change(sigmas[-1] * (noise - noise @ basis @ basis.mT)).abs().max())
    found.control("noise at a right angle to every query changes H", unseen > 1e-12, f"change {unseen:.1e}")


def check(
    *,
    n: int = 4,
    m: int = 6,
    d: int = 16,
    beta: float = 0.25,
    samples: int = 3_000,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    mirror: Callable[[Tensor], Tensor] = torch.neg,
) -> Evidence:
    """How outputs and the mean output change with σ; the mean by pairs ±ε, in which the first order cancels."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, d, generator=draw, dtype=torch.float64) for rows in (n, m, m))
    setting = Setting(q, k, v, beta, attend)
    noise = torch.randn(samples, d, generator=draw, dtype=torch.float64)
    back = mirror(noise)
    sigmas = [0.01 * 2**step for step in range(5)]
    each, centre = [], []
    for sigma in sigmas:
        forth, other = setting.change(sigma * noise), setting.change(sigma * back)
        each.append(float(forth.square().sum((-2, -1)).mean().sqrt()))
        centre.append(float(((forth + other) / 2).mean(0).norm()))
    powers = [exponent(sigmas, sizes).value for sizes in (each, centre)]
    squared, shifted, moved = against_theory(setting, noise, back, sigmas[0])
    found.written(
        "a sample of the noise does not change H to first order",
        each[0] < 1e-12 or powers[0] > 1.5,
        f"H moves by {each[0]:.2g} at σ = {sigmas[0]:g}, in proportion to σ^{powers[0]:.3f}",
    )
    found.written("the mean of H over the noise is H", moved.holds(0), f"it is off by {moved} at σ = {sigmas[0]:g}")
    found.corrected(
        "the mean of H moves in proportion to σ²",
        abs(powers[1] - 2) < 0.1,
        f"only the mean over ±ε is steadier, and moves as σ^{powers[1]:.3f}",
    )
    found.corrected("a sample's change grows as σ", abs(powers[0] - 1) < 0.05, f"as σ^{powers[0]:.3f}")
    found.corrected("its mean square is E(βεᵀq)²·‖dH/ds‖²", abs(squared - 1) < 0.01, f"{squared:.4f} of it")
    found.corrected("the mean moves by ½E(βεᵀq)²·d²H/ds²", abs(shifted - 1) < 0.01, f"{shifted:.4f} of it")
    controls(found, setting, noise, sigmas)
    if min(each + centre) > 0:
        lines = {"one sample (root mean square)": (sigmas, each), "the mean over ±ε": (sigmas, centre)}
        found.draw("how far H moves", lines, x="σ", y="change of H", log="xy")
    found.numbers |= {"exponent of a sample": powers[0], "exponent of the mean": powers[1], "samples": samples}
    return found


CLAIM = Claim(
    id="zero-mean-key-noise",
    sources=("002",),
    statement="A small Gaussian perturbation of mean 0 on one key does not change H, because its mean is 0.",
    formula=r"\hat{H} \approx H + \frac{\partial H}{\partial k_i} \epsilon, \quad \mathbb{E}[\epsilon] = 0 \quad "
    r"\Rightarrow \quad \hat{H} = H",
    refuted="Outputs that move in proportion to σ, or a mean output that is not H.",
    control="Noise with a mean, asked whether the mean moves as σ²; noise at a right angle to all queries, asked "
    "whether it changes H.",
    verdict=FAILS,
    correction="Every perturbation that is not at a right angle to q changes H, in proportion to σ. What has no first "
    "order is the mean change, and it is not 0: to second order it is ½σ²β²‖q‖² a(1 − a)(1 − 2a)(v_i − u), with a the "
    "weight of the key and u the weighted mean of the other values.",
    check=check,
)
