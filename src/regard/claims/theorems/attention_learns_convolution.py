"""Checks that heads which start diffuse become local when trained on images, but not on scrambled images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._observables import Observe
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims.theorems.heads_evolve import train_models
from regard.convolution import HeadConvolution, to_convolution
from regard.nn import MultiHeadAttention
from regard.positions import Grid
from regard.training import Evolution, evolution, train
from regard.training._pixel_offsets import head_offsets
from regard.training.tasks.image_data import load_digits

SIDE = 8
Loss = Callable[[MultiHeadAttention, Tensor, torch.Generator], Tensor]


def pixels() -> Tensor:
    """The digits of the training set minus the mean image, ``[N, 64, 1]``."""
    data = load_digits()
    x = data.pixels[~data.held_out].float().flatten(1).unsqueeze(-1) / 255
    return (x - x.mean(0)) * 2


def hidden_pixel_loss(layer: MultiHeadAttention, x: Tensor, generator: torch.Generator) -> Tensor:
    """Hide half of the pixels and return the squared error of the layer's prediction at the hidden pixels."""
    hidden = torch.rand(x.shape, generator=generator) < 0.5
    error: Tensor = (layer(x * ~hidden) - x)[hidden]
    return error.square().mean()


def head_convolutions(layer: MultiHeadAttention, x: Tensor) -> list[HeadConvolution]:
    """The 3 × 3 convolution that is nearest to each head."""
    with torch.no_grad():
        _, observation = layer(x[:1], observe=Observe(grid=(SIDE, SIDE), keep=True))
    return to_convolution(observation, radius=1)


def local_weight(heads: list[HeadConvolution]) -> float:
    """The mean weight that heads give to the 3 × 3 pixels around the query, inside the image."""
    return sum(float(head.kernel.sum()) for head in heads) / len(heads)


def best_fit(heads: list[HeadConvolution]) -> float:
    """The share of weights that a convolution explains in the best head, minus that share in a uniform head."""
    return max(head.fit - head.uniform_fit for head in heads)


def train_layer(
    x: Tensor, seed: int, steps: int, heads: int, rate: float, loss: Loss
) -> tuple[list[list[HeadConvolution]], list[int]]:
    """Train one layer and return its heads at several steps.

    Scores come only from learned tables of rows and columns. The tables start near 0, so every head starts diffuse.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    layer = MultiHeadAttention(1, heads, d_key=1, d_value=1, d_out=1, scale=0.0, position=Grid(SIDE, SIDE, heads))
    # A head whose output weight is negative predicts a pixel from pixels unlike it, which are far away.
    # Signs alternate, so that both kinds of heads exist with every seed.
    with torch.no_grad():
        sign = (layer.v_proj.weight.flatten() * layer.out_proj.weight.flatten()).sign()
        wanted = torch.ones(heads)
        wanted[1::2] = -1
        layer.out_proj.weight.mul_(sign * wanted)
    # The scale is 0, so queries and keys have no effect and get no gradient.
    trainable = [p for name, p in layer.named_parameters() if not name.startswith(("q_proj", "k_proj"))]
    optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=0.0)
    recorded_steps = sorted({0, steps // 8, steps // 4, steps // 2, steps})  # denser at the start, where most happens
    history = []
    for step in range(steps + 1):
        if step in recorded_steps:
            history.append(head_convolutions(layer, x))
        batch = x[torch.randint(len(x), (32,), generator=generator)]
        error = loss(layer, batch, generator)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return history, recorded_steps


def check(
    *,
    steps: int = 80,
    heads: int = 4,
    rate: float = 0.1,
    seed: int = 0,
    full: bool = False,
    pictures: Callable[[], Tensor] = pixels,
    loss: Loss = hidden_pixel_loss,
    learn: Callable[..., Any] = train,
) -> Evidence:
    """Train a layer to fill in hidden pixels of digits, and of scrambled digits; compare where its heads attend.

    ``full``: also train models of three seeds that classify digits.
    """
    evidence = Evidence()
    x = pictures()
    scrambled = x[:, torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))]
    history, recorded_steps = train_layer(x, seed, steps, heads, rate, loss)
    scrambled_history, _ = train_layer(scrambled, seed, steps, heads, rate, loss)
    local = list(map(local_weight, history))
    final_fit = best_fit(history[-1])
    evidence.add_statement(
        "Heads become local: the 3 × 3 pixels around the query get at least twice the weight that they had at step 0.",
        local[-1] > 2 * local[0],
        f"the 3 × 3 pixels around a query get {local[0]:.2f} of its weight at step 0 and {local[-1]:.2f} at step "
        f"{steps}",
    )
    evidence.add_statement(
        "At least one head is a 3 × 3 convolution, by 0.3 more than a uniform head.",
        final_fit > 0.3,
        f"its convolution explains {final_fit:.2f} more of the best head than of a uniform head",
    )

    # Controls: their statements must be false.
    # At step 0 nothing is learned yet, and scrambled images have no neighbours to learn from.
    first_fit = best_fit(history[0])
    evidence.add_control("One of the same heads is a convolution at step 0.", first_fit > 0.3, f"{first_fit:.2f}")
    mixed = list(map(local_weight, scrambled_history))
    mixed_fit = best_fit(scrambled_history[-1])
    evidence.add_control(
        "Trained on scrambled images, heads become as local.", mixed[-1] >= local[-1], f"weight {mixed[-1]:.2f}"
    )
    evidence.add_control(
        "Trained on scrambled images, a head is a convolution to the same degree.",
        mixed_fit >= final_fit,
        f"its convolution explains {mixed_fit:.2f} more than of a uniform head",
    )
    curves = {"digits": local, "scrambled digits": mixed}
    title = "weight on the 3 × 3 pixels around the query, mean of heads"
    evidence.add_curves(title, recorded_steps, curves, x="step", y="weight")
    evidence.numbers |= {"local weight at step 0": local[0], "local weight at the end": local[-1]}
    evidence.numbers |= {"local weight at the end, scrambled": mixed[-1]}
    for head in history[-1]:
        evidence.numbers[f"centre of head {head.head}"] = list(head.centre)
    evidence.numbers |= {"widths at the end": [head.width for head in history[-1]], "fit beyond uniform": final_fit}
    if full:
        # A model of three layers that classifies digits, with quadratic heads that start broad.
        sizes = {"model.layers": 3, "model.d": 36, "model.heads": 6, "model.hidden": 72, "model.value": 6}
        for model_seed, run in train_models(learn, "pixels", seed, {"steps": 600, "model.alpha": 0.05, **sizes}):
            _check_classifier(evidence, model_seed, evolution(run))
    return evidence


def _check_classifier(evidence: Evidence, seed: int, record: Evolution) -> None:
    """Check that heads in the first layer of a model that classifies digits become more local in training."""
    offsets = head_offsets(record)
    profile = torch.stack([entry.tensors["profile"] for entry in record.records]).double()
    middle = profile.shape[-1] // 2  # offset 0 is in the middle of the profile
    near = profile[..., middle - 1 : middle + 2, middle - 1 : middle + 2].sum((-2, -1))[:, offsets.layers[0]]
    local = near.mean(-1).tolist()
    evidence.add_statement(
        f"Classifying digits, seed {seed}: heads of the first layer become more local.",
        local[-1] > local[0] + 0.1,
        f"seed {seed}: {local[0]:.2f} of the weight is near the query at step 0, {local[-1]:.2f} at the end",
    )
    lines = {}
    for layer, heads in enumerate(offsets.layers):
        lines[f"layer {layer}"] = (record.steps, offsets.width[:, heads].mean(-1).tolist())
    evidence.add_series(f"classifying digits, seed {seed}: mean width of heads", lines, x="step", y="width, pixels")
    evidence.numbers[f"seed {seed}, local weight in the first layer"] = local


CLAIM = Claim(
    id="attention-learns-convolution",
    title="Trained on images, some heads of the first layers become local",
    citations=(("assignment-6", "4.2"),),
    papers=("cordonnier-2020",),
    statement="Trained on images, some heads of the first layers become local: they learn fixed patterns around the "
    "query, like the kernels of a convolution.",
    formula=r"\sum_{\lVert \delta \rVert_\infty \le 1} \bar{A}_{q, q+\delta}: \quad \frac{9}{N} \to 1",
    refuted_by="Heads that start diffuse and, after training on images, are no more local than at the start.",
    control="The same heads at step 0, and heads trained on images whose pixels are all scrambled in the same way.",
    verdict=HOLDS,
    check=check,
)
