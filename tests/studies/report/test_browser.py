"""The page of a run in a browser: sliders move what they should, on any width and on paper."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import mechicl
from mechicl.plots.interactive import HeatMap, explorer, limits, scripts
from mechicl.studies.report import Report
from tests.studies.report.browser import Opened, browser, opened


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def shown(running: Any, made: Report) -> Opened:
    """The page as it opens, for tests that leave it at the last step and the first seed."""
    return opened(running, made.path)


def values(shown: Opened, name: str, shape: tuple[int, ...]) -> np.ndarray:
    code = "Array.from(model.renderers[0].data_source.data.value)"
    return np.array(shown.model(name, code), dtype=float).reshape(shape)


def truth(made: Report, circuit: str, step: int, seed: int) -> np.ndarray:
    result = mechicl.open_run(made.path.parent).stored("circuits")
    assert result is not None
    return result[circuit].sel(step=step, seed=seed).isel(layer=0).values


def press(shown: Opened, key: str, times: int = 1) -> None:
    handle = shown.page.locator(".noUi-handle").first
    for _ in range(times):
        handle.press(key)


def choose(shown: Opened, label: str, option: str) -> None:
    shown.page.get_by_label(label, exact=True).select_option(option)


def at(shown: Opened, circuit: str) -> str:
    return shown.model(f"{circuit} 1", "model.title.text")


def test_the_page_opens_without_complaint_or_network(shown: Opened, made: Report) -> None:
    assert shown.requests == [made.path.as_uri()]
    assert shown.complaints == []
    assert shown.page.locator("canvas").count() >= 8


def test_a_page_that_fails_is_noticed(running: Any, made: Report, tmp_path: Path) -> None:
    broken = tmp_path / "page.html"
    source = made.path.read_text(encoding="utf-8")
    extra = "<script>fail()</script><img alt='' src='https://example.org/a.png'>"
    broken.write_text(source.replace("</main>", f"{extra}</main>"), encoding="utf-8")
    found = opened(running, broken)
    assert any("fail is not defined" in text for text in found.complaints)
    assert any("Content Security Policy" in text for text in found.complaints)
    found.page.close()


@pytest.mark.parametrize("circuit", ["KQ", "OV"])
def test_steps_and_seeds_move_the_heat_maps(running: Any, made: Report, circuit: str) -> None:
    shown = opened(running, made.path)
    limit = {
        seed: max(
            np.abs(truth(made, circuit, step, seed)).max()
            for step in mechicl.open_run(made.path.parent).steps.tolist()
        )
        for seed in (0, 3)
    }

    def agrees(step: int, seed: int) -> None:
        assert at(shown, circuit) == f"head 1, step {step}, seed {seed}"
        for head, expected in enumerate(truth(made, circuit, step, seed)):
            found = values(shown, f"{circuit} {head}", expected.shape)
            np.testing.assert_allclose(found, expected, atol=limit[seed] / 32767)
        high = "model.renderers[0].glyph.fill_color.transform.high"
        assert shown.model(f"{circuit} 0", high) == pytest.approx(limit[seed])

    agrees(40, 0)
    press(shown, "ArrowLeft", 3)
    agrees(25, 0)
    choose(shown, "Seed", "3")
    agrees(25, 3)
    press(shown, "Home")
    agrees(0, 3)
    assert shown.complaints == []
    shown.page.close()


def middle(shown: Opened) -> bytes:
    """The entries in the middle of the first heat map, as they are on the screen."""
    panel = shown.page.locator(".panels > div").first
    panel.scroll_into_view_if_needed()
    shown.page.wait_for_timeout(300)  # drawn with the next frame
    box = panel.bounding_box()
    size = {"width": box["width"] * 0.4, "height": box["height"] * 0.3}
    corner = {"x": box["x"] + box["width"] * 0.35, "y": box["y"] + box["height"] * 0.3}
    return shown.page.screenshot(clip=corner | size)


def test_what_is_on_the_screen_moves(running: Any, made: Report) -> None:
    shown = opened(running, made.path)
    last = middle(shown)
    press(shown, "Home")
    first = middle(shown)
    assert first != last
    assert middle(shown) == first, "and otherwise stays"
    press(shown, "End")
    assert middle(shown) == last
    shown.page.close()


def test_attention_follows_too_and_rows_sum_to_one(running: Any, made: Report) -> None:
    shown = opened(running, made.path)
    last = values(shown, "attention 0", (6, 6))
    np.testing.assert_allclose(last.sum(axis=1), 1.0, atol=1e-3)
    assert (last[:, -1] == 0).all(), "the query does not attend to itself"
    press(shown, "Home")
    first = values(shown, "attention 0", (6, 6))
    np.testing.assert_allclose(first.sum(axis=1), 1.0, atol=1e-3)
    assert np.abs(first - last).max() > 1e-3
    assert shown.model("attention 0", "model.title.text") == "head 0, step 0, seed 0"
    shown.page.close()


def test_the_chosen_step_is_marked_and_the_chosen_seed_stands_out(
    running: Any, made: Report
) -> None:
    shown = opened(running, made.path)
    mark = "model.center.find(each => each.type == 'Span').location"
    alphas = "model.renderers.slice(0, 2).map(line => line.glyph.line_alpha.value)"
    assert (shown.model("loss", mark), shown.model("curves", mark)) == (40, 40)
    assert shown.model("loss", alphas) == [1, 0.3]
    press(shown, "Home")
    choose(shown, "Seed", "3")
    assert (shown.model("loss", mark), shown.model("curves", mark)) == (0.5, 0.5)
    assert shown.model("loss", alphas) == shown.model("curves", alphas) == [0.3, 1]
    dots = "model.renderers.slice(2).map(dot => dot.glyph.fill_alpha.value)"
    assert shown.model("loss", dots) == shown.model("curves", dots) == [0.3, 1]
    shown.page.close()


def test_quantities_are_drawn_one_at_a_time(running: Any, made: Report) -> None:
    shown = opened(running, made.path)
    first = shown.model("curves", "model.title.text")
    choose(shown, "Quantity", "zero_sum_ov: ov_imbalance")
    assert shown.model("curves", "model.title.text") == "zero_sum_ov: ov_imbalance" != first
    result = mechicl.open_run(made.path.parent).stored("zero_sum_ov")
    assert result is not None
    for number, seed in enumerate(result["seed"].values):
        found = shown.model("curves", f"Array.from(model.renderers[{number}].data_source.data.y)")
        expected = result["ov_imbalance"].sel(seed=seed).values
        np.testing.assert_allclose(np.array(found, dtype=float), expected, rtol=1e-6)
    assert shown.complaints == []
    shown.page.close()


def test_a_narrow_screen_scrolls_down_alone(running: Any, made: Report) -> None:
    shown = opened(running, made.path, width=400)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 400
    outside = """Array.from(document.querySelectorAll('h1, h2, h3, p, figcaption, .scroll, canvas'))
        .filter(each => each.getBoundingClientRect().right > 401).length"""
    assert shown.page.evaluate(outside) == 0
    shown.page.evaluate("document.querySelector('h1').style.width = '500px'")
    assert shown.page.evaluate("document.documentElement.scrollWidth") > 400, "the check sees it"
    shown.page.close()


def test_on_paper_there_are_figures_and_no_controls(
    running: Any, made: Report, tmp_path: Path
) -> None:
    shown = opened(running, made.path, width=700)
    shown.page.emulate_media(media="print")
    assert not shown.page.locator(".controls").is_visible()
    assert not shown.page.locator("nav").is_visible()
    assert shown.page.locator("figure img").first.is_visible()
    too_wide = """Array.from(document.querySelectorAll('figure img, .plot, .panels > div, table'))
        .filter(each => each.getBoundingClientRect().right > innerWidth + 1).length"""
    assert shown.page.evaluate(too_wide) == 0
    paper = tmp_path / "page.pdf"
    shown.page.pdf(path=str(paper), format="A4")
    assert paper.read_bytes().startswith(b"%PDF")
    assert paper.stat().st_size > 50_000
    shown.page.close()


def test_a_layer_of_several_is_chosen(running: Any, tmp_path: Path) -> None:
    dims = ("seed", "step", "layer", "head", "d_key", "d_query")
    matrices = np.random.default_rng(0).normal(size=(2, 3, 2, 2, 4, 5))
    given = xr.DataArray(matrices, {"seed": [0, 3], "step": [0, 5, 7]}, dims)
    maps = {"KQ": HeatMap(given, limits(given), symmetric=True)}
    made = explorer(np.array([0, 5, 6, 7]), [0, 3], maps=maps)
    places = "".join([*made.controls, *made.plots["KQ"]])
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><body>{places}{scripts()}{made.script}", encoding="utf-8")
    shown = opened(running, page)
    choose(shown, "Layer", "1")
    for head in (0, 1):
        expected = given.isel(seed=0, step=-1, layer=1, head=head).values
        np.testing.assert_allclose(values(shown, f"KQ {head}", (4, 5)), expected, atol=2e-4)
    choose(shown, "Seed", "3")
    press(shown, "ArrowLeft")  # step 6, which the map has not: it shows step 5
    assert shown.model("KQ 0", "model.title.text") == "head 0, step 5, seed 3"
    expected = given.isel(seed=1, step=1, layer=1, head=0).values
    np.testing.assert_allclose(values(shown, "KQ 0", (4, 5)), expected, atol=2e-4)
    assert shown.complaints == []
    shown.page.close()
