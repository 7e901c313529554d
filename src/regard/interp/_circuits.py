"""Circuits: what heads do, and which head feeds which, from the weights of a model alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn

from regard._checks import check_instance, check_integer
from regard._errors import RegardError
from regard._files import write_text
from regard._terminal import frameless_table, literal_text
from regard.interp._circuits_pairs import KINDS, Edge, InductionPair, PairScores
from regard.interp._circuits_probe import probe
from regard.interp._circuits_scores import (
    Kind,
    LayerFactors,
    copying_scores,
    duplicate_scores,
    ov_eigenvalues,
    previous_scores,
    read_moments,
)
from regard.interp._circuits_tokens import TokenVectors, find_tokens
from regard.interp._circuits_weights import extract
from regard.interp._head_table import csv_text, format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.plots import FigureStyle

Means = Literal["embeddings", "random tokens"]

CIRCUIT_COLUMNS = {
    "copying": "Σ Re λ / Σ |λ| of the eigenvalues of the OV circuit: 1 copies every token, −1 suppresses it",
    "previous": "how far the mean score of the previous token is above that of the other offsets, in deviations",
    "duplicate": "how far the score of the same token is above that of other tokens, in deviations",
    "induction": "largest product of an earlier head's previous score and its match with this head",
}
WINDOW = 32
MOST_TOKENS = 16384
MOST_EDGES = 24  # that a graph shows by default
EDGE_NAMES = {"q": "Q-composition", "k": "K-composition", "v": "V-composition"}


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The matrices of one head: q = u W_Q + b_Q, k = u W_K + b_K, v = u W_V + b_V, and the head writes v W_O.

    - ``query``, ``key [D, d]``, ``value [D, E]``: W_Q, W_K, W_V with the γ of the norm before them.
    - ``out [E, D]``: W_O.
    - ``query_bias``, ``key_bias [d]``, ``value_bias [E]``: with the β of the norm.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor


def circuits(
    model: nn.Module,
    inputs: Tensor | Callable[[], Any] | None = None,
    *,
    window: int = WINDOW,
    tokens: int = MOST_TOKENS,
    means: Means = "embeddings",
) -> Circuits:
    """Read the circuits of all heads from a model's weights: copying, previous-token and induction scores, composition.

        OV = W_V W_O        QK = W_Q W_Kᵀ        composition = ‖OV₁ · QK₂‖ / (‖OV₁‖ ‖QK₂‖)

    - ``model``: any model that ``regard.watch`` takes, if linear layers make its queries, keys and values.
    - ``inputs``: one run on random inputs finds the weights and verifies them. Token ids, images or vectors, or a
      function that runs the model, replace its inputs; needed for models that read something else.
    - ``window``: the scores compare the offsets 0 … window − 1 from key to query. It is also the length of the run.
    - ``tokens``: how many tokens the scores use at most; of a larger vocabulary evenly spaced ones.
    - ``means``: the mean vector that the previous score uses: that of the embeddings, from weights alone, or that of
      what each layer read in the run ("random tokens").

    Returns ``Circuits``. Raises ``RegardError`` that names the layer if its weights cannot be found or verified.

    >>> found = circuits(regard.models.load(regard.models.bundled()))
    >>> [(edge.earlier, edge.later) for edge in found.composition("k", 2)]
    [('1.0', '2.2'), ('1.0', '2.3')]
    """
    check_instance("model", model, nn.Module)
    check_integer("window", window, least=3)
    check_integer("tokens", tokens, least=2)
    if means not in ("embeddings", "random tokens"):
        raise RegardError(f"means must be 'embeddings' or 'random tokens', got {means!r}")
    if inputs is not None and not isinstance(inputs, Tensor) and not callable(inputs):
        raise RegardError(f"inputs must be a tensor or a function that runs the model, got {type(inputs).__name__}")
    with torch.no_grad():
        run = probe(model, inputs, _run_length(model, window))
        layers = [extract(call) for call in run.calls]
        token_vectors = find_tokens(model, run, layers[0].q, tokens)
        factors = [LayerFactors.of(layer, window) for layer in layers]
        return Circuits(type(model).__name__, factors, token_vectors, means)


def _run_length(model: nn.Module, window: int) -> int:
    """The window, or what the model can read."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    limits = [
        getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_target_positions")
    ]
    limits.append(getattr(model, "max_positions", None))
    return min([window, *(limit for limit in limits if isinstance(limit, int) and limit > 2)])


class Circuits:
    """The circuits of a model's heads. ``circuits`` makes it; heads are named "layer.head".

    ``notes`` says what the matrices leave out, for example scales that no weight knows.

    >>> found = regard.interp.circuits(regard.models.load(regard.models.bundled()))
    >>> found
    Circuits of 12 heads of TextDecoder
    >>> found.top("induction", 2)
    [('decoder.blocks.2.attention', 2), ('decoder.blocks.2.attention', 3)]
    """

    def __init__(
        self, model: str, layers: Sequence[LayerFactors], tokens: TokenVectors | None, means: Means = "embeddings"
    ) -> None:
        self.model = model
        self.means = means
        self.paths = [factors.layer.path for factors in layers]
        self._layers = list(layers)
        self._tokens = tokens
        self._scores = [self._score_layer(factors) for factors in layers]
        self._pairs = PairScores(self._layers, tokens)
        notes = [note for factors in layers for note in factors.layer.notes]
        if tokens is None:
            notes.append("no token vectors: the model reads no tokens, or changes them before its first layer")
        elif tokens.unembedding is None:
            notes.append("no unembedding: the model has no head, or one that is not linear")
        self.notes = list(dict.fromkeys(notes))

    def __repr__(self) -> str:
        return f"Circuits of {sum(self.head_counts)} heads of {self.model}"

    @property
    def head_counts(self) -> list[int]:
        """The number of heads of each layer."""
        return [factors.layer.heads for factors in self._layers]

    @property
    def heads(self) -> list[dict[str, Any]]:
        """One row per head: ``path``, ``layer``, ``head``, the columns of ``CIRCUIT_COLUMNS``, and ``source``.

        ``source`` is the earlier head of the largest induction score. A number that the model has no meaning for is
        None: without tokens there is only composition.
        """
        best: dict[str, InductionPair] = {}
        for pair in self.induction():
            best.setdefault(pair.later, pair)
        rows = []
        for layer, (path, scores) in enumerate(zip(self.paths, self._scores, strict=True)):
            for head in range(self.head_counts[layer]):
                source = best.get(f"{layer}.{head}")
                row: dict[str, Any] = {"path": path, "layer": layer, "head": head}
                row |= {name: _number(scores[name], head) for name in ("copying", "previous", "duplicate")}
                row["induction"] = row["source"] = None
                if source is not None:
                    row["induction"] = source.score
                if source is not None and source.score > 0:
                    row["source"] = source.earlier
                rows.append(row)
        return rows

    def weights(self, layer: int | str, head: int) -> HeadWeights:
        """The matrices of one head; a layer is a module path or its number."""
        number, head = self._locate(layer, head)
        factors = self._layers[number]
        key_head = factors.layer.key_head(head)
        return HeadWeights(
            query=factors.query[head],
            key=factors.key[head],
            value=factors.value[head],
            out=factors.out[head],
            query_bias=factors.query_bias[head],
            key_bias=factors.key_bias[head],
            value_bias=factors.layer.v.bias[key_head],
        )

    def eigenvalues(self, layer: int | str, head: int) -> Tensor:
        """The E eigenvalues of a head's OV circuit U-to-token map, complex, divided by the number of tokens used.

        They are the nonzero eigenvalues of the V × V matrix of what each token, if attended to, adds to all logits.
        """
        number, head = self._locate(layer, head)
        found = None
        if self._tokens is not None:
            found = ov_eigenvalues(self._layers[number], self._tokens, head)
        if found is None:
            raise RegardError(f"{self.model} has no eigenvalues of OV circuits: {self.notes[-1]}")
        return found

    def composition(self, kind: Kind = "k", limit: int | None = None) -> list[Edge]:
        """How strongly each pair of heads composes, the largest z-score first.

        - ``kind``: "q", "k" or "v": what of the later head reads the earlier head's output.
        - ``limit``: how many pairs; all by default.
        """
        if kind not in KINDS:
            raise RegardError(f'kind must be "q", "k" or "v", got {kind!r}')
        return self._pairs.edges(kind, limit)

    def induction(self, limit: int | None = None, *, copying: bool = False) -> list[InductionPair]:
        """Pairs of heads that may form an induction circuit, the largest score first.

            score = max(previous of the earlier head, 0) · max(match of the pair, 0)

        - ``limit``: how many pairs; all by default.
        - ``copying``: also multiply by max(copying of the later head, 0).

        Without token vectors the list is empty.
        """
        return self._pairs.induction(
            [scores["previous"] for scores in self._scores],
            [scores["copying"] for scores in self._scores],
            limit,
            copying,
        )

    def top(self, column: str, limit: int | None = None) -> list[tuple[str, int]]:
        """The heads with the largest values of a column, as pairs (path, head) that ``ablate`` takes."""
        return [(row["path"], row["head"]) for row in self._sorted(column)[:limit]]

    def table(self, sort: str | None = None, limit: int | None = None) -> Table:
        """The heads as a table for the terminal: all, or the ``limit`` heads with the largest ``sort``."""
        rows = self.heads
        title = f"{len(rows)} heads of {self.model}, from weights"
        if sort is not None:
            rows = self._sorted(sort)
            title += f", by {sort}"
        table = frameless_table(title)
        if self.notes:
            table.caption = literal_text("; ".join(self.notes))
            table.caption_justify = "left"
        table.add_column("head", no_wrap=True)
        for name in CIRCUIT_COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("induction from")
        for row in rows[:limit]:
            cells = [f"{row['layer']}.{row['head']}"]
            cells += [format_number(row[name]) for name in CIRCUIT_COLUMNS]
            table.add_row(*cells, row["source"] or "–")
        return table

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """The heads as CSV; also written to ``file`` if one is given."""
        columns = ["path", "layer", "head", *CIRCUIT_COLUMNS, "source"]
        return write_text(csv_text(columns, self.heads), file)

    def figure(
        self,
        edges: int = MOST_EDGES,
        *,
        kinds: Sequence[Kind] = ("k",),
        title: str | None = None,
        style: FigureStyle | None = None,
    ) -> Figure:
        """Draw the strongest compositions as a matplotlib figure: layers are columns, heads are rows.

        - ``edges``: how many of each kind.
        - ``kinds``: "q", "k", "v", or several of them.
        """
        from regard import plots  # matplotlib is optional

        check_integer("edges", edges, least=1)
        drawn = {}
        for kind in kinds:
            strongest = self.composition(kind, edges)
            largest = max((edge.z for edge in strongest), default=1.0)
            shown = [edge for edge in strongest if edge.z > 0]
            drawn[EDGE_NAMES[kind]] = [(*edge.ends, edge.z / largest) for edge in shown]
        if title is None:
            title = f"{self.model}: the strongest compositions of heads"
        return plots.graph(self.head_counts, drawn, title=title, style=style)

    def graph(
        self,
        edges: int = MOST_EDGES,
        *,
        kinds: Sequence[Kind] = ("k",),
        title: str | None = None,
        style: FigureStyle | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> str:
        """The text of an SVG file with the strongest compositions; see ``figure``. Also written to ``file``."""
        from regard import plots

        return write_text(plots.svg_text(self.figure(edges, kinds=kinds, title=title, style=style)), file)

    def _repr_svg_(self) -> str | None:
        """Notebooks display the graph, if matplotlib is installed."""
        try:
            return self.graph()
        except ImportError:
            return None

    def _score_layer(self, factors: LayerFactors) -> dict[str, Tensor | None]:
        """The scores of one layer's heads; those that have no meaning are None."""
        layer = factors.layer
        scores: dict[str, Tensor | None] = dict.fromkeys(("copying", "previous", "duplicate"))
        tokens = self._tokens
        if tokens is None:
            return scores
        scores["copying"] = copying_scores(factors, tokens)
        # Queries and keys of two sequences have no offset, and no common tokens.
        if layer.cross:
            return scores
        if self.means == "embeddings":
            query = tokens.moments(layer.q.kind)
            key = tokens.moments(layer.k.kind)
        else:
            query = read_moments(layer.q, by_position=tokens.has_positions)
            key = read_moments(layer.k, by_position=tokens.has_positions)
        scores["previous"] = previous_scores(factors, query, key)
        scores["duplicate"] = duplicate_scores(factors, tokens)
        return scores

    def _locate(self, layer: int | str, head: int) -> tuple[int, int]:
        if isinstance(layer, str):
            if layer not in self.paths:
                raise RegardError(f"layer must be one of {', '.join(self.paths)}, got {layer!r}")
            layer = self.paths.index(layer)
        check_integer("layer", layer, least=0)
        if layer >= len(self._layers):
            raise RegardError(f"layer must be below {len(self._layers)}, got {layer}")
        check_integer("head", head, least=0)
        if head >= self.head_counts[layer]:
            raise RegardError(f"head must be below {self.head_counts[layer]} in layer {layer}, got {head}")
        return layer, head

    def _sorted(self, column: str) -> list[dict[str, Any]]:
        """The rows, the largest value first and those without a value last."""
        if column not in CIRCUIT_COLUMNS:
            raise RegardError(f"column must be one of {', '.join(CIRCUIT_COLUMNS)}, got {column!r}")

        def sort_key(row: dict[str, Any]) -> float:
            if row[column] is None:
                return -torch.inf
            return float(row[column])

        return sorted(self.heads, key=sort_key, reverse=True)


def _number(scores: Tensor | None, head: int) -> float | None:
    if scores is None:
        return None
    return float(scores[head])
