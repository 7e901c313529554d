"""The Convolution page of the lab: its numbers are those of ``regard.convolution``; the page in a browser."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import torch
from support.lab_pages import fits, lab_request
from torch import nn

from regard.convolution import to_attention
from regard.lab.convolution import images as convolution_images
from regard.lab.convolution import responses as convolution_responses
from regard.lab.convolution.endpoints import CompareRequest, ErrorsRequest, HeadsRequest

KERNEL = [[0.5, -1.0, 0.25], [2.0, 0.125, -0.75], [1.0, 0.0, -3.0]]


def picture(height: int = 7, width: int = 5) -> list[list[float]]:
    return [[round(math.sin(3 * i + 5 * j), 3) for j in range(width)] for i in range(height)]


def layers(kernel: list[list[float]], alpha: float, **options: Any) -> tuple[nn.Conv2d, nn.Module]:
    conv = nn.Conv2d(1, 1, len(kernel), bias=False, **options).double()
    conv.weight.data.copy_(torch.tensor(kernel))
    return conv, to_attention(conv, alpha=alpha)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("alpha", [None, 2.0])
def test_both_outputs_equal_the_librarys(mode: Any, stride: int, dilation: int, alpha: float | None) -> None:
    rows = picture()
    response = convolution_responses.compare(
        CompareRequest(kernel=KERNEL, picture=rows, mode=mode, stride=stride, dilation=dilation, alpha=alpha)
    )
    options = {"stride": stride, "dilation": dilation, "padding": dilation, "padding_mode": mode}
    conv, layer = layers(KERNEL, math.inf if alpha is None else alpha, **options)
    x = torch.tensor(rows, dtype=torch.float64)[None, None]
    with torch.no_grad():
        difference = (layer(x) - conv(x))[0, 0]
        np.testing.assert_allclose(response["convolution"], conv(x)[0, 0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(response["difference"], difference, rtol=0, atol=1e-12)
        bound = float(layer.error_bound(x).max())  # type: ignore[operator]
    assert response["largest"] == pytest.approx(float(difference.abs().max()), abs=1e-12)
    assert response["bound"] == pytest.approx(bound) and response["largest"] <= bound + 1e-12
    if alpha is None:
        assert response["largest"] <= 1e-12
    else:
        assert response["largest"] > 1e-3


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 7])
def test_kernels_of_every_side_are_exact_in_the_limit(side: int) -> None:
    kernel = [[float(i - 2 * j) for j in range(side)] for i in range(side)]
    response = convolution_responses.compare(CompareRequest(kernel=kernel, picture=picture()))
    assert response["largest"] <= 1e-12 and len(response["shifts"]) == side**2
    assert [len(response["convolution"]), len(response["convolution"][0])] == [7, 5]


def test_errors_fall_with_alpha_below_their_bound() -> None:
    response = convolution_responses.errors(ErrorsRequest(kernel=KERNEL, picture=picture(), alphas=[0.5, 2.0, 8.0]))
    assert response["errors"] == sorted(response["errors"], reverse=True)
    assert all(error <= bound for error, bound in zip(response["errors"], response["bounds"], strict=True))
    single = convolution_responses.compare(CompareRequest(kernel=KERNEL, picture=picture(), alpha=2.0))
    assert (response["errors"][1], response["bounds"][1]) == (single["largest"], single["bound"])


@pytest.mark.parametrize("alpha", [None, 1.5])
def test_heads_attend_to_their_offsets(alpha: float | None) -> None:
    request = HeadsRequest(size=3, height=7, width=5, row=1, column=2, stride=2, dilation=2, alpha=alpha)
    binary = convolution_responses.head_weights(request)
    assert dict(binary.headers)["x-shape"] == "9,11,9"
    weights = np.frombuffer(binary.data, dtype="<f4").reshape(9, 11, 9)
    np.testing.assert_allclose(weights.sum((1, 2)), 1, rtol=1e-6)
    y, x = np.mgrid[:11, :9]
    for head, (dy, dx) in enumerate((dy, dx) for dy in (-2, 0, 2) for dx in (-2, 0, 2)):
        away = (y - (2 + 2 + dy)) ** 2 + (x - (4 + 2 + dx)) ** 2  # the query at 2, 4; two pixels of padding
        expected = (away == 0).astype(float) if alpha is None else np.exp(-alpha * away)
        np.testing.assert_allclose(weights[head], expected / expected.sum(), atol=1e-6)


def test_sample_images_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("the digits come with scikit-learn")

    convolution_images.sample_images.cache_clear()
    monkeypatch.setattr(convolution_images, "load_digits", missing)
    response = convolution_images.sample_images()
    convolution_images.sample_images.cache_clear()
    assert "scikit-learn" in response["missing"] and {"disc", "stripes", "checker", "text"} <= set(response["pictures"])
    for rows in response["pictures"].values():
        assert len(rows) <= 28 and all(len(row) == len(rows) and all(0 <= x <= 1 for x in row) for row in rows)


REFUSED = [
    ({"kernel": [[1, 2]], "picture": [[1]]}, 400, "kernel must"),
    ({"kernel": [[1]], "picture": [[1, 2], [1]]}, 400, "picture must"),
    ({"kernel": KERNEL, "picture": [[1, 2]], "mode": "reflect"}, 400, "mode='reflect'"),
    ({"kernel": [[1] * 7] * 7, "picture": [[1] * 28] * 28, "dilation": 3}, 400, "picture or kernel"),
    ({"kernel": [[1] * 8] * 8, "picture": [[1]]}, 422, "length"),
    ({"kernel": [[1]], "picture": [[1] * 29]}, 422, "length"),
    ({"kernel": [[1]], "picture": [["x"]]}, 422, "float"),
    ({"kernel": [[1]], "picture": [[1]], "alpha": 0}, 422, "0.05"),
    ({"kernel": [[1]], "picture": [[1]], "stride": 4}, 422, "3"),
    ({"kernel": [[]], "picture": [[]]}, 422, "length"),
]


@pytest.mark.parametrize(("body", "status", "mention"), REFUSED)
def test_what_is_refused(address: str, body: Any, status: int, mention: str) -> None:
    request = lab_request(address + "api/convolution/both", json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == status and mention in json.load(error.value)["error"]


def test_a_pixel_outside_the_output_is_refused(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        query = "size=3&height=8&width=8&row=8&column=0"
        urllib.request.urlopen(lab_request(f"{address}api/convolution/heads?{query}"))
    assert error.value.code == 400 and "8 × 8" in json.load(error.value)["error"]


# The page


def shown(tab: Any, *parts: str) -> None:
    """Wait until the page shows results of a setting with these parts."""
    tab.wait_for_selector(".convolution" + "".join(f"[data-shown*='{part}']" for part in parts))


def largest(tab: Any) -> float:
    return float(tab.locator("[data-value]").get_attribute("data-value"))


@pytest.mark.parametrize("width", [1280, 390])
def test_the_difference_goes_to_zero(lab_page: Any, width: int) -> None:
    tab = lab_page("?page=convolution&kernel=blur&picture=digit 3&alpha=1", width)
    shown(tab, '"alpha":1')
    soft = largest(tab)
    rows = convolution_images.sample_images()["pictures"]["digit 3"]
    kernel = [[x * y / 16 for x in (1, 2, 1)] for y in (1, 2, 1)]
    expected = convolution_responses.compare(
        CompareRequest(kernel=[[round(x, 3) for x in row] for row in kernel], picture=rows, alpha=1.0)
    )
    assert soft == pytest.approx(expected["largest"], rel=0.05)  # names are written with three digits
    assert float(tab.locator("[data-bound]").get_attribute("data-bound")) >= soft
    slider = tab.get_by_label("α, soft to hard")
    slider.press("End")
    shown(tab, '"alpha":"inf"')
    assert largest(tab) <= 1e-12 and "alpha=inf" in tab.url and fits(tab)
    tab.wait_for_selector("[data-done] .js-plotly-plot")


def test_kernels_and_options_can_be_changed(lab_page: Any) -> None:
    tab = lab_page("?page=convolution&picture=disc&alpha=4")
    shown(tab, '"k":3')
    assert tab.locator(".heads .one").count() == 9
    for side in ("1", "2", "4", "5"):
        tab.get_by_label("side K").select_option(side)
        shown(tab, f'"k":{side},')
        assert tab.locator(".heads .one").count() == int(side) ** 2
    for name in ("identity", "edge down", "sharpen", "emboss", "random"):
        tab.get_by_label("kernel", exact=True).and_(tab.locator("select")).select_option(name)
    shown(tab, '"k":5')
    assert "from=random" in tab.url
    tab.get_by_label("side K").select_option("3")
    tab.get_by_label("kernel, row 1, column 2").fill("7.5")
    shown(tab, '"k":3', "7.5")
    assert tab.get_by_label("kernel", exact=True).and_(tab.locator("select")).input_value() == "own"
    tab.get_by_label("padding").select_option("circular")
    tab.get_by_label("stride").select_option("2")
    tab.get_by_label("dilation").select_option("3")
    shown(tab, '"mode":"circular"', '"stride":2', '"dilation":3')
    assert fits(tab)
    value = largest(tab)
    again = lab_page(tab.url[tab.url.index("?") :], 390, dark=True)
    shown(again, '"mode":"circular"', "7.5")
    assert largest(again) == value and fits(again)


def test_a_pixel_and_a_head_can_be_selected(lab_page: Any) -> None:
    tab = lab_page("?page=convolution&kernel=identity&picture=disc&alpha=inf&at=2,3")
    tab.wait_for_selector(".convolution[data-looked='2,3']")
    canvas = tab.locator("[data-map=attention] canvas")
    canvas.press("ArrowDown")
    tab.wait_for_selector(".convolution[data-looked='3,3']")
    assert "at=3%2C3" in tab.url and tab.locator(".readout").inner_text().startswith("Output 4, 4: convolution")
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 5.5 / 12, box["y"] + box["height"] * 6.5 / 12)  # previews
    tab.wait_for_selector(".convolution[data-looked='6,5']")
    assert "at=3%2C3" in tab.url
    tab.mouse.click(box["x"] + box["width"] * 5.5 / 12, box["y"] + box["height"] * 6.5 / 12)  # locks
    tab.wait_for_url(re.compile("at=6%2C5"))
    value = convolution_images.sample_images()["pictures"]["disc"][6][5]
    assert f"convolution {value:.2f}" in tab.locator(".readout").inner_text()
    tab.locator("#theme").click()  # everything is painted anew
    tab.locator(".heads .one").nth(5).hover()
    tab.locator("p", has_text="Head 6 attends to the pixel 1 right of its query: weight 1.00 there").wait_for()


@pytest.mark.parametrize("width", [1280, 390])
def test_an_image_can_be_drawn(lab_page: Any, width: int) -> None:
    tab = lab_page("?page=convolution&picture=point&alpha=1", width)
    shown(tab, '"picture":"point"')
    tab.get_by_role("button", name="clear").click()
    shown(tab, '"picture":"own"')
    tab.locator("[data-value='0']").wait_for()
    canvas = tab.locator("canvas.drawn")
    canvas.press("ArrowRight")
    canvas.press("Space")
    tab.wait_for_selector("[data-value]:not([data-value='0'])")
    tab.wait_for_url(re.compile("picture=12x12%3A0f000"))
    if width > 600:
        box = canvas.bounding_box()
        tab.mouse.move(box["x"] + 3, box["y"] + box["height"] - 3)
        tab.mouse.down()
        tab.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] - 3, steps=30)
        tab.mouse.up()
        tab.wait_for_url(re.compile("12x12%3A[0f]{132}f{12}"))
    assert fits(tab)


def test_impossible_paddings_are_disabled(lab_page: Any) -> None:
    tab = lab_page("?page=convolution&k=7&picture=digit 1&mode=reflect&alpha=8")
    shown(tab, '"mode":"reflect"')
    # A message vanishes after seconds, perhaps before a busy machine reads it.
    tab.evaluate("""() => {
      window.messages = [];
      new MutationObserver((changes) => {
        for (const change of changes) for (const node of change.addedNodes) window.messages.push(node.textContent);
      }).observe(document.getElementById("notes"), { childList: true });
    }""")
    tab.get_by_label("dilation").select_option("3")
    shown(tab, '"mode":"zeros"', '"dilation":3')
    assert tab.locator("option[value=reflect]").is_disabled() and tab.locator("option[value=circular]").is_disabled()
    assert "too small" in tab.locator("option[value=reflect]").text_content()
    assert any("reflect would copy 9 pixels" in message for message in tab.evaluate("window.messages"))
