"""Checks that, with noise on all keys, q = t(μ_a + μ_b) averages two values only if t is neither small nor large."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import mean_interval, power_law_exponent
from regard.claims.theorems.noisy_key_breaks_one_head import weights

NEAR = 0.05  # a smaller error counts as the average; the error of v_a alone is 0.707


def independent_noise(samples: int, n: int, d: int, generator: torch.Generator) -> Tensor:
    """Independent standard normal noise for every key."""
    return random_normal(generator, samples, n, d)


def query_for_both(a: Tensor, b: Tensor, t: float) -> Tensor:
    """The document's query."""
    return t * (a + b)


class Setting(NamedTuple):
    """Standard noise ``[samples, n, d]`` for keys with the means e_i, the query, and the attention function."""

    noise: Tensor
    query: Callable[[Tensor, Tensor, float], Tensor]
    attention_fn: AttentionFn

    def squared_errors(self, t: float, alpha: float) -> Tensor:
        """``‖c − ½(v_a + v_b)‖²`` for values e_j, as ``[samples]``."""
        n, d = self.noise.shape[1:]
        a, b = torch.eye(d, dtype=torch.float64)[:2]  # the means of the first two keys
        keys = torch.eye(n, d, dtype=torch.float64) + math.sqrt(alpha) * self.noise
        c = weights(self.query(a, b, t), keys, self.attention_fn)
        c[:, :2] -= 0.5  # with values e_j the output c is the weights
        return c.square().sum(-1)

    def error(self, t: float, alpha: float) -> float:
        """The root mean square error."""
        return math.sqrt(float(self.squared_errors(t, alpha).mean()))


def check(
    *,
    n: int = 8,
    d: int = 16,
    alpha: float = 1e-8,
    samples: int = 2_000,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    noise: Callable[[int, int, int, torch.Generator], Tensor] = independent_noise,
    query: Callable[[Tensor, Tensor, float], Tensor] = query_for_both,
) -> Evidence:
    """Measure the error of the average below ln n, between ln n and 1/√α, and above 1/√α."""
    evidence = Evidence()
    setting = Setting(noise(samples, n, d, torch.Generator().manual_seed(seed)), query, attention_fn)
    low = math.log(n)
    high = 1 / math.sqrt(alpha)
    above = setting.error(10 * high, alpha)
    below = setting.error(low / 4, alpha)
    evidence.add_statement(
        "Any large t averages the two values.",
        above < NEAR,
        f"at t = {10 * high:.0e} the error is {above:.3f}; the error of v_a alone would be 0.707",
    )

    # Between the two limits, the error is small and grows in proportion to t.
    middle = math.sqrt(low * high)
    error = setting.error(middle, alpha)
    evidence.add_condition(
        "Between ln n and 1/√α the output is ½(v_a + v_b).",
        error < NEAR,
        f"at t = {middle:.3g}, between ln n and 1/√α, the error is {error:.4f}",
    )
    ratio = mean_interval(setting.squared_errors(middle, alpha) / (alpha * middle**2 / 2))
    evidence.add_condition("There, the mean square error is αt²/2.", ratio.contains(1), f"measured: {ratio} times that")
    times = [middle / 4 * 2**step for step in range(5)]
    power = power_law_exponent(times, [setting.error(t, alpha) for t in times])
    evidence.add_condition("The error grows in proportion to t.", abs(power - 1) < 0.05, f"it grows as t^{power:.3f}")
    evidence.numbers |= {"error between the limits": error, "power of t": power}
    evidence.add_condition("Above 1/√α the output is v_a or v_b.", above > 0.6, f"error {above:.3f} at t = 10/√α")
    evidence.add_condition("Below ln n the other keys have weight.", below > 0.2, f"error {below:.3f} at t = ln(n)/4")

    # A control: its statement must be false.
    # With this much noise 1/√α is below ln n, so no t lies between the two limits.
    strong = 1.0
    best = min(setting.error(0.25 * 2**step, strong) for step in range(8))
    evidence.add_control(
        f"At α = {strong:g}, where 1/√α is below ln n, some t averages the two values.",
        best < NEAR,
        f"the error is {best:.3f} at the best t",
    )
    times = [0.25 * 2 ** (1.5 * step) for step in range(14)]
    lines = {}
    for level in (alpha, 100 * alpha, 1e4 * alpha):
        lines[f"α = {level:.0e}"] = (times, [max(setting.error(t, level), 1e-16) for t in times])
    evidence.add_series("root mean square error of the average", lines, x="t", y="error", log="xy")
    evidence.numbers |= {"ln n": low, "1/√α": high, "error above 1/√α": above, "error below ln n": below}
    evidence.numbers["smallest error at α = 1"] = best
    return evidence


CLAIM = Claim(
    id="average-under-isotropic-noise",
    title="With small noise on keys, the query t(μ_a + μ_b) with large t averages two values",
    citations=(("worked-answers", "(c)"),),
    statement="With small noise of covariance αI on keys with orthonormal means, the query t(μ_a + μ_b) with t much "
    "larger than 0 still gives the average of v_a and v_b.",
    formula=r"k_i \sim \mathcal{N}(\mu_i, \alpha I), \quad q = t (\mu_a + \mu_b), \ t \gg 0 \quad \Rightarrow \quad "
    r"c \approx \frac{1}{2} (v_a + v_b)",
    refuted_by="A large t at which the output is not near the average.",
    control="Noise so strong that 1/√α is below ln n: no t may give the average.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="The query t(μ_a + μ_b) averages v_a and v_b if t is well above ln n and well below 1/√α.",
    correction="t lies well above ln n and well below 1/√α. In between, the mean square error is αt²/2, so it grows "
    "with t. Above 1/√α, the scores of a and b differ by more than 1 and the output is one of the two values.",
    check=check,
)
