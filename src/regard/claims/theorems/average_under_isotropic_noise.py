"""q = t(μ_a + μ_b) with noise on all keys: t must be neither small nor large."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import mean, slope
from regard.claims.theorems.noisy_key_breaks_one_head import weights


def normal(samples: int, n: int, d: int, draw: torch.Generator) -> Tensor:
    """Noise of its own for every key."""
    return torch.randn(samples, n, d, generator=draw, dtype=torch.float64)


def to_both(a: Tensor, b: Tensor, t: float) -> Tensor:
    """The document's query."""
    return t * (a + b)


class Setting(NamedTuple):
    """Standard noise ``[samples, n, d]`` on keys of means e_i, the query, and the operator."""

    noise: Tensor
    query: Callable[[Tensor, Tensor, float], Tensor]
    attend: Callable[..., Any]

    def squares(self, t: float, alpha: float) -> Tensor:
        """``[samples]``: ‖c − ½(v_a + v_b)‖² with values e_j."""
        n, d = self.noise.shape[1:]
        a, b = torch.eye(d, dtype=torch.float64)[:2]
        keys = torch.eye(n, d, dtype=torch.float64) + math.sqrt(alpha) * self.noise
        c = weights(self.query(a, b, t), keys, self.attend)
        c[:, :2] -= 0.5
        return c.square().sum(-1)

    def error(self, t: float, alpha: float) -> float:
        """The root of the mean square."""
        return math.sqrt(float(self.squares(t, alpha).mean()))


def inside(found: Evidence, setting: Setting, alpha: float, middle: float) -> None:
    """Between ln n and 1/√α: how small the error is, and how it grows."""
    error = setting.error(middle, alpha)
    found.condition(
        "between ln n and 1/√α the output is ½(v_a + v_b)",
        error < 0.02,
        f"at t = {middle:.3g}, between ln n and 1/√α, the error is {error:.4f}",
    )
    ratio = mean(setting.squares(middle, alpha) / (alpha * middle**2 / 2))
    found.condition("its mean square there is αt²/2", ratio.holds(1), f"{ratio} of it")
    times = [middle / 4 * 2**step for step in range(5)]
    power = slope([math.log(t) for t in times], [math.log(max(setting.error(t, alpha), 1e-300)) for t in times])
    found.condition("so the error grows with t", abs(power.value - 1) < 0.05, f"as t^{power.value:.3f}")
    found.numbers |= {"error between": error, "power of t": power.value}


def check(
    *,
    n: int = 8,
    d: int = 16,
    alpha: float = 1e-8,
    samples: int = 2_000,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    noise: Callable[[int, int, int, torch.Generator], Tensor] = normal,
    query: Callable[[Tensor, Tensor, float], Tensor] = to_both,
) -> Evidence:
    """The error of the average against t: below ln n, between, above 1/√α, and where nothing is between."""
    found = Evidence()
    setting = Setting(noise(samples, n, d, torch.Generator().manual_seed(seed)), query, attend)
    low, high = math.log(n), 1 / math.sqrt(alpha)
    beyond, below = setting.error(10 * high, alpha), setting.error(low / 4, alpha)
    found.written(
        "any large t averages the two values",
        beyond < 0.02,
        f"at t = {10 * high:.0e} the error is {beyond:.3f}, and that of v_a alone is 0.707",
    )
    inside(found, setting, alpha, math.sqrt(low * high))
    found.condition("beyond 1/√α the output is v_a or v_b", beyond > 0.6, f"error {beyond:.3f} at t = 10/√α")
    found.condition("below ln n the other keys count", below > 0.2, f"error {below:.3f} at t = ln(n)/4")
    many = 0.25
    best = min(setting.error(0.25 * 2**step, many) for step in range(8))
    found.control(
        f"some t averages at α = {many:g}, where 1/√α is below ln n", best < 0.02, f"error {best:.3f} at the best t"
    )
    lines = {}
    for level in (alpha, 100 * alpha, 1e4 * alpha):
        times = [0.25 * 2 ** (1.5 * step) for step in range(14)]
        lines[f"α = {level:.0e}"] = (times, [max(setting.error(t, level), 1e-16) for t in times])
    found.draw("root mean square error of the average", lines, x="t", y="error", log="xy")
    found.numbers |= {"ln n": low, "1/√α": high, "error beyond": beyond, "error below": below, "best at α = ¼": best}
    return found


CLAIM = Claim(
    id="average-under-isotropic-noise",
    sources=("004",),
    statement="With small noise of covariance αI on keys of orthonormal means, the query t(μ_a + μ_b) with t much "
    "larger than 0 still gives the average of v_a and v_b.",
    formula=r"k_i \sim \mathcal{N}(\mu_i, \alpha I), \quad q = t (\mu_a + \mu_b), \ t \gg 0 \quad \Rightarrow \quad "
    r"c \approx \frac{1}{2} (v_a + v_b)",
    refuted="A large t at which the output is not near the average.",
    control="Noise so strong that 1/√α is below ln n, asked whether any t averages.",
    verdict=HOLDS_IF,
    correction="t must lie well above ln n and well below 1/√α. In between the mean square error is αt²/2, so it grows "
    "with t; beyond 1/√α the scores of a and b differ by more than 1 and the output is one of the two values.",
    check=check,
)
