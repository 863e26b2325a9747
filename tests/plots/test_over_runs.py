"""The figure of a probe over runs: what is drawn, for a few runs and for a thousand."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from mechicl import plots

FLAGS = {"flag_values": [-1, 0, 1], "flag_meanings": "negative dummy positive"}


def made(n_runs: int, n_seeds: int = 2, **attrs: object) -> xr.Dataset:
    """A study's headline at the last step: runs differ, seed 1 of run 0 is not there."""
    rng = np.random.default_rng(0)
    eta = np.arange(n_runs)[:, None] + 0.1 * rng.normal(size=(n_runs, n_seeds))
    holds = (rng.random((n_runs, n_seeds)) < 0.7).astype(float)
    labels = np.tile(np.arange(float(n_seeds)), (n_runs, 1))
    for table in (eta, holds, labels):
        table[0, 1] = np.nan
    return xr.Dataset(
        {
            "eta": (("run", "seed"), eta, {"units": "1", "long_name": "step size eta"}),
            "holds": (("run", "seed"), holds),
        },
        coords={
            "run": np.arange(n_runs),
            "run_name": ("run", [f"run-{number}" for number in range(n_runs)]),
            "seed_label": (("run", "seed"), labels),
        },
        attrs={"figure": "over_runs", "probe": "p", "statement": "eta is large"} | attrs,
    )


def drawn(result: xr.Dataset) -> Figure:
    """The figure, rendered, so that nothing is left to fail."""
    figure = plots.draw(result)
    figure.canvas.draw()
    return figure


def points(figure: Figure, panel: int = 0, line: int = 0) -> np.ndarray:
    """The finite points of a line, (point, 2)."""
    data = np.array(figure.axes[panel].lines[line].get_xydata(), dtype=float)
    return data[np.isfinite(data).all(axis=1)]


def test_every_seed_is_a_point_and_every_run_a_median() -> None:
    result = made(3)
    figure = drawn(result)
    seeds, medians = points(figure), points(figure, line=1)
    assert len(seeds) == 5
    np.testing.assert_allclose(medians[:, 1], np.nanmedian(result["eta"], axis=1))
    names = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert names == ["run-0", "run-1", "run-2"]
    assert "p over 3 runs, 5 seeds" in figure.get_suptitle()


def test_the_title_counts_verdicts_and_what_is_undefined() -> None:
    result = made(3)
    result["holds"].values[:] = [[1, np.nan], [1, 0], [np.nan, np.nan]]
    said = drawn(result).get_suptitle()
    assert "η is large" in said
    assert "2 of 3 seeds, undefined for 2" in said


@pytest.mark.parametrize(
    ("x", "scale"), [([1.0, 2.0, 2.0, 3.0], "linear"), ([1e-4, 1e-3, 1e-3, 1e-2], "log")]
)
def test_a_number_that_varies_is_the_axis(x: list[float], scale: str) -> None:
    result = made(4, x_label="model.n_heads").assign_coords(x=("run", x))
    result["holds"].values[1:3] = [[1, 1], [1, 0]]
    figure = drawn(result)
    panel, verdicts = figure.axes[:2]
    assert panel.get_xlabel() == "model.n_heads"
    assert panel.get_xscale() == verdicts.get_xscale() == scale
    at = [line.get_xydata()[0].tolist() for line in verdicts.lines]
    assert [x[1], 0.75] in at, "both runs at that place"
    here = points(figure, line=1)[:, 0]
    assert here[1] != here[2], "side by side"
    assert here[1] < x[1] < here[2]


def test_words_are_categories() -> None:
    result = made(3, x_label="model.name").assign_coords(x=("run", ["softmax", "linear", "linear"]))
    figure = drawn(result)
    names = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert names == ["linear", "softmax"]


def test_codes_have_words_and_no_median() -> None:
    result = made(3)
    roles = np.zeros((3, 2, 2))
    result["role"] = (("run", "seed", "place"), roles, FLAGS | {"long_name": "role"})
    result = result.drop_vars("eta").assign_attrs(heads_by="omega, the largest first")
    figure = drawn(result)
    words = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert words == ["negative", "dummy", "positive"]
    assert len(figure.axes[0].lines) == 2, "a place each, and no medians"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["place 0", "place 1"]
    assert "heads in the order of ω" in figure.get_suptitle()


def test_what_is_not_shown_is_said() -> None:
    result = made(3, not_aligned="recovered moved")
    assert "not shown" in drawn(result).get_suptitle()
    empty = drawn(made(2).drop_vars(["eta", "holds"]))
    assert empty.axes[0].texts[0].get_text() == "no headline variable over seeds"


@pytest.mark.parametrize("name", [r"a$^{b$", r"$\frac{$ x", "$5 and $6"])
def test_dollars_in_names_begin_no_formula(name: str) -> None:
    result = made(3)
    result = result.assign_coords(
        run_name=("run", [name, "b", "c"]), x=("run", np.array([name, name, "c"]))
    )
    result["eta"].attrs |= {"flag_values": [0, 1], "flag_meanings": f"{name.split()[0]} one"}
    for each in (result, result.drop_vars("x")):
        figure = drawn(each)  # a formula that is none would be an error
        labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
        assert name.replace("$", r"\$") in labels
    assert result["run_name"].values[0] == name


def test_nothing_defined_says_so() -> None:
    result = made(2)
    result["eta"].values[:], result["holds"].values[:] = np.nan, np.nan
    figure = drawn(result)
    assert figure.axes[0].texts[0].get_text() == "undefined"
    assert "×" in figure.axes[1].get_title()


def test_a_thousand_runs_have_no_names_and_counts_for_verdicts() -> None:
    result = made(1000)
    figure = drawn(result)
    assert len(points(figure)) == 1999
    assert max(figure.get_size_inches()) < 20
    assert not any("run-" in text.get_text() for text in figure.axes[0].get_xticklabels())
    counts = [patch.get_width() for patch in figure.axes[1].patches]
    assert counts == [(result["holds"] == 1).sum().item(), (result["holds"] == 0).sum().item()]


def test_long_names_leave_panels_their_height() -> None:
    heights = {}
    for name in ("run", "n_heads-2_noise_variance-0.1"):
        result = made(4)
        result["run_name"] = ("run", [f"{name}-{number}" for number in range(4)])
        figure = drawn(result)
        heights[name] = figure.axes[0].get_window_extent().height
        assert result["run_name"].values[3] == figure.axes[0].get_xticklabels()[3].get_text()
    short, long = heights.values()
    assert long > 0.75 * short
