"""Figures of what was seen: the numbers drawn are the observation's own, the words those of the recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from regard import Observe, attention, watch
from regard.interp import Recording, figures
from regard.nn import Decoder, VisionTransformer
from regard.plots import FigureStyle

PATH = "blocks.1.attention"
WORDS = ["the", "$cat", "sat_", "on", "a", "mat", "."]


def watched(observe: Observe, n: int = 7, batch: int = 1, words: bool = True, **call) -> Recording:
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=37).eval()
    for parameter in model.parameters():  # weights as drawn at first are nearly uniform
        parameter.data *= 1.5
    with torch.no_grad(), watch(model, observe) as seen:
        model(torch.randint(37, (batch, n)), **call)
    if words:
        seen.metadata["tokens"] = WORDS
    return seen


def drawn(figure) -> np.ndarray:
    return np.asarray(figure.axes[0].images[0].get_array())


def labels(axis) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


def close(found, wanted) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-5)


def test_all_heads_are_there():
    seen = watched(Observe(map=5), n=11)
    axes, _ = figures.heads(seen).axes
    assert len(axes.images) == 6
    for at, image in enumerate(axes.images):
        layer, head = divmod(at, 3)
        keys = torch.tensor([3, 2, 2, 2, 2])  # of 11 in each of 5 bins: a cell shows the weight per key
        close(image.get_array(), seen[f"blocks.{layer}.attention"].map[head] / keys)
    assert labels(axes.yaxis) == ["0", "1"] and labels(axes.xaxis) == ["0", "1", "2"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")


def test_a_figure_of_a_page_fits_on_it():
    """30 layers of 9 heads would be 22 inches high with square maps."""
    q = torch.zeros(1, 9, 8, 4)
    _, observation = attention(q, q, q, observe=Observe(map=8))
    seen = Recording({f"layers.{i}.attention": [observation] for i in range(30)})
    width, height = figures.heads(seen, style=FigureStyle(width="page")).get_size_inches()
    assert width == 6.75 and height < 9.5


def test_uniform_attention_has_one_colour():
    """64 bins hold 3 or 4 of 200 keys: sums over bins would be stripes."""
    q = torch.zeros(1, 1, 200, 4)
    _, observation = attention(q, q, q, observe=Observe(map=64, keep=True))
    for x in (observation, replace(observation, saved_calls=())):
        seen = Recording({"layer": [x]})
        for figure in (figures.heads(seen), figures.head_map(seen, 0, 0)):
            close(drawn(figure), np.full((64, 64), 1 / 200))
            assert "per key" in str([text.get_text() for axes in figure.axes for text in axes.findobj(Text)])


def test_chosen_heads_are_drawn_under_their_numbers():
    """Position in the observation is not a head's number."""
    torch.manual_seed(0)
    model = Decoder(12, heads=3, layers=2, vocab=37).eval()
    ids, ask = torch.randint(37, (1, 7)), Observe(map=7, profile=3, top=2)
    with torch.no_grad(), watch(model, ask) as whole:
        model(ids)
    with torch.no_grad(), watch(model, ask, heads=[(0, 0), (1, 2), (1, 0)]) as seen:
        model(ids)
    axes, _ = figures.heads(seen).axes
    assert labels(axes.xaxis) == ["0", "2"]
    wanted = [whole[f"blocks.{layer}.attention"].map[head] for layer, head in ((0, 0), (1, 0), (1, 2))]
    images = [np.asarray(image.get_array()) for image in axes.images]
    for x, image in zip(wanted, [images[0], images[2], images[3]], strict=True):
        close(image, x)
    assert not images[1].any()  # layer 0's head 2 was not chosen
    for head in (0, 2):
        close(drawn(figures.head_map(seen, PATH, head)), drawn(figures.head_map(whole, PATH, head)))
        mine, all_ = (figures.head_lines(x, PATH, head).axes[0].collections for x in (seen, whole))
        for a, b in zip(mine, all_, strict=True):
            close(a.get_array() if a.get_array() is not None else 0, b.get_array() if b.get_array() is not None else 0)
        figures.head_profile(seen, PATH, head)
    for draw in (figures.head_map, figures.head_lines, figures.head_profile):
        with pytest.raises(ValueError, match="head is 1; this observation has heads 2, 0"):
            draw(seen, PATH, 1)


def test_bins_that_hold_no_token_are_not_drawn():
    seen = watched(Observe(map=16, keep=True))
    for at, image in enumerate(figures.heads(seen).axes[0].images):
        layer, head = divmod(at, 3)
        close(image.get_array(), seen[f"blocks.{layer}.attention"].weights(head))


def test_maps_are_asked_for():
    with pytest.raises(ValueError, match=r"Observe\(map=64\)"):
        figures.heads(watched(Observe()))
    with pytest.raises(ValueError, match="empty"):
        figures.heads(Recording())
    with pytest.raises(ValueError, match=r"Observe\(map=64\) or Observe\(keep=True\)"):
        figures.head_map(watched(Observe()), PATH, 0)
    mixed = watched(Observe(map=3))
    mixed.calls["blocks.0.attention"] = watched(Observe()).calls["blocks.0.attention"]
    figure = figures.heads(mixed)
    assert len(figure.axes[0].images) == 3 and "(1 of 2 layers have maps)" in figure.texts[0].get_text()


def test_a_kept_head_is_drawn_exactly():
    seen = watched(Observe(keep=True))
    figure = figures.head_map(seen, PATH, 2)
    close(drawn(figure), seen[PATH].weights(2))
    assert labels(figure.axes[0].yaxis) == labels(figure.axes[0].xaxis) == WORDS
    figure = figures.head_map(seen, PATH, 1, rows=slice(3, 6), keys=[4, 0, -3])
    close(drawn(figure), seen[PATH].weights(1, slice(3, 6), [4, 0, 4]))
    assert labels(figure.axes[0].yaxis) == WORDS[3:6]
    assert labels(figure.axes[0].xaxis) == [WORDS[4], WORDS[0], WORDS[4]]
    assert figure.texts[0].get_text() == f"{PATH} · head 1"


def test_a_place_may_be_given_by_its_number():
    seen = watched(Observe(keep=True, profile=2))
    for draw in (figures.head_map, figures.head_profile, figures.head_lines):
        assert [text.get_text() for text in draw(seen, 1, 2).texts] == [
            text.get_text() for text in draw(seen, PATH, 2).texts
        ]
    with pytest.raises(KeyError, match="no layer '2'"):
        figures.head_map(seen, 2, 0)


def test_a_pooled_region_says_where_it_is():
    seen = watched(Observe(keep=True), n=31, words=False)
    figure = figures.head_map(seen, PATH, 1, rows=range(10, 30), size=5)
    keys = torch.tensor([7, 6, 6, 6, 6])  # of 31 in each of 5 bins
    close(drawn(figure), seen[PATH].tile(1, range(10, 30), None, 5) / keys)
    assert "per key" in figure.axes[1].get_ylabel()
    assert figure.axes[0].get_ylim() == (29.5, 9.5) and figure.axes[0].get_xlim() == (-0.5, 30.5)
    figure = figures.head_map(seen, PATH, 1, rows=[1, 2, 4, 8, 16, 30, 7], size=3)
    assert labels(figure.axes[0].yaxis) == ["1 …", "8 …", "30 …"]
    assert labels(figures.head_map(seen, PATH, 1, rows=[5, 3]).axes[0].yaxis) == ["5", "3"]


def test_a_batch_has_the_words_of_its_first_text_only():
    seen = watched(Observe(keep=True, map=7, top=7), batch=2)
    figure = figures.head_map(seen, PATH, 0, batch=1)
    close(drawn(figure), seen[PATH].weights(0, batch=1))
    assert not set(WORDS) & set(labels(figure.axes[0].yaxis))
    assert set(WORDS) & {text.get_text() for text in figures.head_lines(seen, PATH, 0).axes[0].texts}
    assert not set(WORDS) & {text.get_text() for text in figures.head_lines(seen, PATH, 0, batch=1).axes[0].texts}
    with pytest.raises(ValueError, match="batch is 2"):
        figures.head_lines(seen, PATH, 0, batch=2)
    pooled = figures.head_map(watched(Observe(map=7), batch=2), PATH, 0)  # of two texts: no one's words
    assert not set(WORDS) & set(labels(pooled.axes[0].yaxis))


def test_a_head_that_was_not_kept_is_drawn_from_its_map():
    seen = watched(Observe(map=9))
    figure = figures.head_map(seen, PATH, 2)
    close(drawn(figure), watched(Observe(keep=True))[PATH].weights(2))
    assert labels(figure.axes[0].yaxis) == WORDS
    for region in ({"rows": [1]}, {"keys": [1]}, {"size": 3}, {"batch": 1}):
        with pytest.raises(ValueError, match=r"need q and k, which were not kept: Observe\(keep=True\)"):
            figures.head_map(seen, PATH, 2, **region)
    for head in (3, -1):
        with pytest.raises(ValueError, match=r"heads 0 … 2|at least 0"):
            figures.head_map(seen, PATH, head)
    with pytest.raises(KeyError, match="no layer 'x'"):
        figures.head_map(seen, "x", 0)


def test_a_profile_ends_where_nobody_sees_a_key():
    seen = watched(Observe(profile=9))
    axes = figures.head_profile(seen, PATH, 1).axes[0]
    at = [round(x.get_x() + x.get_width() / 2) for x in axes.patches]
    assert at == list(range(-6, 1))  # causal, seven tokens
    close([x.get_height() for x in axes.patches], seen[PATH].profile[1][3:10])
    with pytest.raises(ValueError, match=r"Observe\(profile=32\)"):
        figures.head_profile(watched(Observe()), PATH, 1)


def test_a_profile_on_a_grid_is_a_map():
    torch.manual_seed(0)
    model = VisionTransformer(image=(6, 10), patch=2, d=12, heads=3, layers=1, classes=3).eval()
    with torch.no_grad(), watch(model, Observe(profile=(1, 2), grid=(3, 5))) as seen:
        model(torch.randn(1, 3, 6, 10))
    path = next(iter(seen))
    close(drawn(figures.head_profile(seen, path, 2)), seen[path].profile[2])


@pytest.mark.parametrize("observe", [Observe(keep=True), Observe(top=7)])
def test_lines_are_the_weights(observe):
    exact = watched(Observe(keep=True))[PATH].weights(1).numpy()
    figure = figures.head_lines(watched(observe), PATH, 1)
    (found,) = figure.axes[0].collections
    close(found.get_colors()[:, 3], sorted(exact[exact >= 0.02]))
    assert [text.get_text() for text in figure.axes[0].texts][:14] == WORDS * 2
    figure = figures.head_lines(watched(observe), PATH, 1, rows=[2, -1])
    chosen = exact[[2, 6]]
    close(figure.axes[0].collections[0].get_colors()[:, 3], sorted(chosen[chosen >= 0.02]))
    assert [text.get_text() for text in figure.axes[0].texts][:2] == [WORDS[2], WORDS[6]]


def test_lines_of_a_long_text_show_the_keys_that_have_one():
    seen = watched(Observe(keep=True), n=89, words=False)
    with pytest.raises(ValueError, match="has 89 queries; lines are for up to 80: choose rows"):
        figures.head_lines(seen, PATH, 0)
    figure = figures.head_lines(seen, PATH, 0, rows=[88, 3])
    weights = seen[PATH].weights(0, [88, 3]).numpy()
    keys = [str(j) for j in np.nonzero((weights >= 0.02).any(0))[0]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["88", "3", *keys, "queries", "keys"]
    assert f"{len(keys)} of 89 keys" in figure.texts[0].get_text() and len(keys) < 80


def test_padded_rows_have_no_lines():
    seen = watched(Observe(keep=True), padding=[4])
    found = [text.get_text() for text in figures.head_lines(seen, PATH, 0).axes[0].texts]
    assert found == [*WORDS[:4], *WORDS, "queries", "keys"]


def test_lines_need_weights():
    with pytest.raises(ValueError, match=r"Observe\(keep=True\) or Observe\(top=8\)"):
        figures.head_lines(watched(Observe()), PATH, 0)
    with pytest.raises(ValueError, match="choose none of 7"):
        figures.head_lines(watched(Observe(top=2)), PATH, 0, rows=[])
    calls = watched(Observe(top=2), n=5).calls[PATH] + watched(Observe(top=2), n=4).calls[PATH]
    with pytest.raises(ValueError, match="unequal sizes"):
        figures.head_lines(Recording({PATH: calls}), PATH, 0)
