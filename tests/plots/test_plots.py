import importlib
import subprocess
import sys

import matplotlib.figure
import numpy as np
import pytest
import xarray as xr

from mechicl import analyses, plots
from mechicl.plots import generic, style
from tests import trajectories
from tests.analyses.toy import CHEAP, forward


def result_of(name: str, n_seeds: int = 2) -> xr.Dataset:
    record = analyses.get(name)
    trajectory = trajectories.learning(n_seeds, 8, 2)
    return record(trajectory, forward() if record.forward else None, **CHEAP.get(name, {}))


def labels(figure: matplotlib.figure.Figure) -> set[str]:
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def test_every_own_figure_is_a_module_named_as_its_probe():
    assert set(plots.OWN) <= set(analyses.names())
    for name in plots.OWN:
        assert callable(importlib.import_module(f"mechicl.plots.{name}").draw)


@pytest.mark.parametrize("name", [name for name in plots.OWN if name != "circuits"])
def test_axes_are_labelled_and_seeds_are_named(name, tmp_path):
    figure = plots.draw(result_of(name))
    figure.savefig(tmp_path / "figure.png", dpi=30)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert any(axes.get_xlabel() == "training step" for axes in figure.axes)
    assert all(axes.get_ylabel() for axes in figure.axes)
    named = labels(figure) | {axes.get_ylabel() for axes in figure.axes}
    for seed in (0, 1):
        assert any(f"seed {seed}" in text for text in named)


def test_circuits_show_their_numbers_in_one_symmetric_scale():
    result = result_of("circuits")
    figure = plots.draw(result)
    kq = [axes for axes in figure.axes if axes.get_title().startswith("KQ")]
    ov = [axes for axes in figure.axes if axes.get_title().startswith("OV")]
    assert len(kq) == len(ov) == 4
    for panels in (kq, ov):
        limits = {image.get_clim() for axes in panels for image in axes.images}
        assert len(limits) == 1
        low, high = limits.pop()
        assert low == -high < 0
    shown = result["KQ"].isel(step=-1, layer=0)
    np.testing.assert_array_equal(kq[0].images[0].get_array(), shown.isel(seed=0, head=0))
    np.testing.assert_array_equal(kq[3].images[0].get_array(), shown.isel(seed=1, head=1))
    last_row = result["OV"].isel(step=-1, layer=0, seed=0, head=1, d_out=-1)
    np.testing.assert_array_equal(ov[1].images[0].get_array()[:, 0], last_row)
    first = importlib.import_module("mechicl.plots.circuits").draw(result, step=0)
    assert "step 0" in first.get_suptitle()


def test_the_curve_of_the_manifold_and_the_paths_are_the_results():
    result = result_of("solution_manifold")
    figure = plots.draw(result)
    size, distance, plane = figure.axes
    np.testing.assert_array_equal(size.lines[0].get_ydata(), result["eta"].values[0])
    np.testing.assert_array_equal(distance.lines[1].get_ydata(), result["distance"].values[1])
    np.testing.assert_array_equal(plane.lines[0].get_xdata(), result["gamma"].values[0])
    np.testing.assert_array_equal(plane.lines[0].get_ydata(), result["mu_gamma"].values[0])
    assert {"seed 0", "seed 1", "μ_γ of (4.6)"} <= labels(figure)


def test_step_zero_is_on_the_axis():
    for name in ("sign_matching", "zero_sum_ov", "head_roles"):
        axes = plots.draw(result_of(name)).axes[-1]
        assert axes.get_xscale() == "symlog"
        left, right = axes.get_xlim()
        assert left <= 0 < 10_000 <= right


def test_references_are_named():
    assert any(
        text.startswith("vanilla_gd") for text in labels(plots.draw(result_of("approximate_loss")))
    )


def outside(**variables: object) -> xr.Dataset:
    data = xr.Dataset(variables, coords={"seed": [0, 1], "step": [0, 5, 500]})
    data.attrs = {"probe": "made_elsewhere", "statement": "it works"}
    return data


def test_probes_without_a_figure_get_the_generic_one(tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 3))
    data = outside(
        speed=(("seed", "step"), values, {"units": "nat", "long_name": "speed of it"}),
        each=(("seed", "step", "head"), np.zeros((2, 3, 2)), {"units": "1"}),
        never=(("seed", "step"), np.full((2, 3), np.nan), {"units": "1", "long_name": "never"}),
        undefined=(("seed", "step"), np.zeros((2, 3))),
        scalar=((), 1.0),
        since=(("seed",), np.array([5.0, np.nan])),
    )
    figure = plots.draw(data)
    figure.savefig(tmp_path / "figure.png", dpi=30)
    drawn = {axes.get_title(): axes for axes in figure.axes if axes.axison}
    assert set(drawn) == {"speed of it", "each, head 0", "each, head 1", "never"}
    assert drawn["speed of it"].get_ylabel() == "speed [nat]"
    np.testing.assert_array_equal(drawn["speed of it"].lines[1].get_ydata(), values[1])
    assert [text.get_text() for text in drawn["never"].texts] == ["undefined"]
    assert "it works: 1 of 2 seeds" in figure.get_suptitle()
    assert labels(figure) == {"seed 0", "seed 1"}


def test_the_name_of_a_helper_is_no_figure():
    data = outside(speed=(("seed", "step"), np.zeros((2, 3)), {"units": "1"}))
    for name in ("style", "generic", None):
        data.attrs["probe"] = name
        assert isinstance(plots.draw(data), matplotlib.figure.Figure)


def test_a_result_with_nothing_over_steps_still_draws(tmp_path):
    generic.draw(outside(scalar=((), 1.0))).savefig(tmp_path / "figure.png", dpi=30)


def test_many_seeds_can_be_told_apart():
    looks = {(style.colour(seed), style.dash(seed)) for seed in range(32)}
    assert len(looks) == 32


def test_no_figure_touches_pyplot_or_any_layer_but_schema():
    code = (
        "import sys, mechicl.plots as p, importlib\n"
        "for name in (*p.OWN, 'generic'): importlib.import_module(f'mechicl.plots.{name}')\n"
        "names = [m for m in sys.modules if m.startswith('mechicl.')]\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "print(sorted({n.split('.')[1] for n in names}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['errors', 'plots', 'schema']"
