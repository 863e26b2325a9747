"""Interactive plots: what is handed to the browser is what was given."""

import re

import numpy as np
import pytest
import xarray as xr

from mechicl.plots.interactive import LARGEST, HeatMap, explorer, limits, packed, scripts

DIMS = ("seed", "step", "layer", "head", "d_key", "d_query")
STEPS = np.array([0, 1, 10])


@pytest.fixture
def values() -> xr.DataArray:
    drawn = np.random.default_rng(0).normal(size=(2, 3, 1, 2, 3, 4))
    return xr.DataArray(drawn, {"seed": [4, 7], "step": STEPS}, DIMS)


@pytest.fixture
def loss() -> xr.DataArray:
    drawn = np.array([[1.0, 0.5, 0.2], [np.nan, -1.0, 0.1]])
    coords = {"seed": [4, 7], "log_step": STEPS}
    return xr.DataArray(drawn, coords, ("seed", "log_step"), attrs={"units": "nat"})


def test_a_seed_has_its_own_scale_over_all_steps(values: xr.DataArray) -> None:
    values[1] *= 1000
    expected = np.abs(values.values).max(axis=(1, 2, 3, 4, 5))
    np.testing.assert_array_equal(limits(values), expected)
    np.testing.assert_array_equal(limits(values.transpose(..., "seed")), expected)


def test_what_is_not_finite_has_no_part_in_the_scale(values: xr.DataArray) -> None:
    expected = limits(values.isel(step=[0, 1]))
    values[:, 2] = np.inf
    np.testing.assert_array_equal(limits(values), expected)
    np.testing.assert_array_equal(limits(values * np.nan), [1, 1])
    np.testing.assert_array_equal(limits(values * 0.0), [1, 1])


def test_entries_are_packed_to_a_part_in_thirty_thousand(values: xr.DataArray) -> None:
    values[0, 1, 0, 0, 0, 0] = np.nan
    values[1, 1, 0, 0, 0, 0] = -np.inf
    drawn = HeatMap(values, limits(values), symmetric=True)
    entries = packed(drawn)
    assert entries.dtype == np.int16
    back = entries.reshape(values.shape) * drawn.limits.reshape(2, 1, 1, 1, 1, 1) / LARGEST
    finite = np.isfinite(values.values)
    assert np.abs(back - values.values)[finite].max() <= drawn.limits.max() / LARGEST / 2 * 1.01
    assert (entries.reshape(values.shape)[~finite] == -32768).all()
    assert (entries.reshape(values.shape)[finite] >= -LARGEST).all()


def test_every_plot_has_its_places(values: xr.DataArray, loss: xr.DataArray) -> None:
    curve = loss.rename(log_step="step")
    drawn = HeatMap(values, limits(values), symmetric=True)
    made = explorer(STEPS, [4, 7], loss=loss, curves={"a": curve}, maps={"KQ": drawn})
    assert {name: len(parts) for name, parts in made.plots.items()} == {
        "loss": 1,
        "curves": 2,  # a choice of the quantity
        "KQ": 1 + 2,  # a colour bar, and a panel a head
    }
    assert len(made.controls) == 2
    several = xr.concat([values, values], "layer", join="exact").transpose(*DIMS)
    drawn = HeatMap(several, limits(several), symmetric=True)
    layered = explorer(STEPS, [4, 7], maps={"KQ": drawn})
    assert {name: len(parts) for name, parts in layered.plots.items()} == {"KQ": 1 + 1 + 2}


def test_a_run_without_anything_to_draw_has_controls() -> None:
    made = explorer(np.array([0]), [0])
    assert made.plots == {}
    assert len(made.controls) == 2


def test_numbers_beyond_single_precision_are_no_warning(
    values: xr.DataArray, loss: xr.DataArray
) -> None:
    drawn = HeatMap(values * 1e200, limits(values * 1e200), symmetric=True)
    curve = (loss * 1e200).rename(log_step="step")
    explorer(STEPS, [4, 7], loss=loss * 1e200, curves={"a": curve}, maps={"KQ": drawn})


def test_names_cannot_end_the_script(loss: xr.DataArray) -> None:
    name = "</script><b>'\"&"
    made = explorer(STEPS, [4, 7], curves={name: loss.rename(log_step="step")})
    assert made.script.count("</script>") == 1
    assert made.script.rstrip().endswith("</script>")
    assert "<b>" not in made.script


def test_bokeh_comes_with_the_page() -> None:
    text = scripts()
    assert 1_000_000 < len(text) < 1_800_000
    assert " src=" not in "".join(re.findall(r"<script[^>]*>", text))
