"""Checks whether noise of mean 0 on one key leaves the output unchanged, sample by sample and in the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.claims._statistics import Interval, mean_interval, power_law_exponent


class Setting(NamedTuple):
    """Queries ``[n, d]``, keys and values ``[m, d]``, β, and the operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: float
    attention_fn: AttentionFn

    def output_change(self, noise: Tensor) -> Tensor:
        """``[samples, n, d]``: the change of the outputs when noise ``[samples, d]`` is added to key 0."""
        samples = len(noise)
        keys = self.k.repeat(samples, 1, 1, 1)
        keys[:, 0, 0] += noise
        q = self.q.expand(samples, 1, *self.q.shape)
        v = self.v.expand(samples, 1, *self.v.shape)
        after: Tensor = self.attention_fn(q, keys, v, scale=self.beta)
        before: Tensor = self.attention_fn(self.q[None, None], self.k[None, None], self.v[None, None], scale=self.beta)
        return (after - before)[:, 0]

    def derivatives(self) -> tuple[Tensor, Tensor]:
        """dH/ds and ½ d²H/ds² for the score s = β k_0ᵀq, ``[n, d]`` each.

        They are a(1 − a)(v_0 − u) and ½a(1 − a)(1 − 2a)(v_0 − u), where a is the weight of key 0 and u is the mean of
        the other values with the other weights.
        """
        a = (self.beta * self.q @ self.k.mT).softmax(-1)
        first = a[:, :1]
        difference = self.v[0] - (a[:, 1:] @ self.v[1:]) / (1 - first)
        return first * (1 - first) * difference, first * (1 - first) * (1 - 2 * first) * difference / 2


def compare_with_theory(
    setting: Setting, noise: Tensor, mirrored: Tensor, sigma: float
) -> tuple[float, float, Interval]:
    """For the query whose mean output changes most: E‖ΔH‖² and E ΔH, each divided by its prediction, and E ΔH itself.

    The ratios divide by (βσ εᵀq)² of the same samples, not by its expectation, so that chance cancels.
    """
    first, second = setting.derivatives()
    query = int((second.norm(dim=-1) * setting.q.square().sum(-1)).argmax())
    change = setting.output_change(sigma * noise)[:, query]
    mirrored_change = setting.output_change(sigma * mirrored)[:, query]
    squares = (setting.beta * sigma * (noise @ setting.q[query])).square().mean()
    square_ratio = change.square().sum(-1).mean() / (squares * first[query].square().sum())
    along = (change + mirrored_change) / 2 @ (second[query] / second[query].norm())
    mean_ratio = along.mean() / (squares * second[query].norm())
    return float(square_ratio), float(mean_ratio), mean_interval(along)


def check(
    *,
    n: int = 4,
    m: int = 6,
    d: int = 16,
    beta: float = 0.25,
    samples: int = 3_000,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    mirror: Callable[[Tensor], Tensor] = torch.neg,
) -> Evidence:
    """Measure how outputs and their mean change with σ. The mean is over pairs ±ε, in which the first order cancels."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (random_normal(generator, rows, d) for rows in (n, m, m))
    setting = Setting(q, k, v, beta, attention_fn)
    noise = random_normal(generator, samples, d)
    mirrored = mirror(noise)
    sigmas = [0.01 * 2**step for step in range(5)]
    sample_changes = []
    mean_changes = []
    for sigma in sigmas:
        change = setting.output_change(sigma * noise)
        mirrored_change = setting.output_change(sigma * mirrored)
        sample_changes.append(float(change.square().sum((-2, -1)).mean().sqrt()))
        mean_changes.append(float(((change + mirrored_change) / 2).mean(0).norm()))
    sample_power = power_law_exponent(sigmas, sample_changes)
    mean_power = power_law_exponent(sigmas, mean_changes)
    square_ratio, mean_ratio, mean_change = compare_with_theory(setting, noise, mirrored, sigmas[0])

    evidence.add_statement(
        "A sample of the noise does not change H to first order.",
        sample_changes[0] < 1e-12 or sample_power > 1.5,
        f"H changes by {sample_changes[0]:.2g} at σ = {sigmas[0]:g}, in proportion to σ^{sample_power:.3f}",
    )
    evidence.add_statement(
        "The mean of H over the noise is H.",
        mean_change.contains(0),
        f"the mean differs from H by {mean_change} at σ = {sigmas[0]:g}",
    )
    evidence.add_correction(
        "The mean of H changes in proportion to σ².",
        abs(mean_power - 2) < 0.1,
        f"only the mean over ±ε changes less, as σ^{mean_power:.3f}",
    )
    evidence.add_correction(
        "The change of a sample is proportional to σ.", abs(sample_power - 1) < 0.05, f"as σ^{sample_power:.3f}"
    )
    evidence.add_correction(
        "The mean square of the change is E(βεᵀq)²·‖dH/ds‖².", abs(square_ratio - 1) < 0.01, f"{square_ratio:.4f} of it"
    )
    evidence.add_correction(
        "The mean changes by ½E(βεᵀq)²·d²H/ds².", abs(mean_ratio - 1) < 0.01, f"{mean_ratio:.4f} of it"
    )

    # Controls: their statements must be false. The first noise has a mean, the second is orthogonal to every query.
    changes = [float(setting.output_change(sigma * (noise + 1)).mean(0).norm()) for sigma in sigmas]
    shifted_power = power_law_exponent(sigmas, changes)
    evidence.add_control(
        "Noise with a mean of σ changes the mean output in proportion to σ².",
        abs(shifted_power - 2) < 0.1,
        f"the mean output changes as σ^{shifted_power:.3f}",
    )
    basis = torch.linalg.qr(setting.q.mT)[0]
    orthogonal = noise - noise @ basis @ basis.mT
    moved = float(setting.output_change(sigmas[-1] * orthogonal).abs().max())
    evidence.add_control("Noise orthogonal to every query changes H.", moved > 1e-12, f"H changes by {moved:.1e}")

    # A logarithmic axis has no 0, which a changed operator may give.
    if min(sample_changes + mean_changes) > 0:
        curves = {"one sample (root mean square)": sample_changes, "the mean over ±ε": mean_changes}
        evidence.add_curves("how far H moves", sigmas, curves, x="σ", y="change of H", log="xy")
    evidence.numbers |= {"exponent of a sample": sample_power, "exponent of the mean": mean_power, "samples": samples}
    return evidence


CLAIM = Claim(
    id="zero-mean-key-noise",
    title="Small noise of mean 0 on one key does not change the output",
    citations=(("homework-3", "1.1 (e)"),),
    statement="A small Gaussian perturbation of mean 0 on one key does not change H, because its mean is 0.",
    formula=r"\hat{H} \approx H + \frac{\partial H}{\partial k_i} \epsilon, \quad \mathbb{E}[\epsilon] = 0 \quad "
    r"\Rightarrow \quad \hat{H} = H",
    refuted_by="Outputs that change in proportion to σ, or a mean output that is not H.",
    control="Noise with a mean: its mean output must not change as σ². Noise orthogonal to all queries: it must not "
    "change H.",
    verdict=FALSE_AS_STATED,
    what_holds="Noise on a key changes the output in proportion to σ. Only the mean change is smaller, of order σ².",
    correction="Every perturbation that is not orthogonal to q changes H, in proportion to σ. Only the mean change "
    "has no first order, and it is not 0: to second order it is ½σ²β²‖q‖² a(1 − a)(1 − 2a)(v_i − u), where a is the "
    "weight of the key and u is the weighted mean of the other values.",
    check=check,
)
