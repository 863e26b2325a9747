"""A study as a table: words for codes, reasons, settings that differ, and the one that varies."""

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import MemoryStore

from mechicl.studies import settings
from mechicl.studies.table import at_the_end, figure_data, table, varied

RECIPES = (
    {"name": "a", "task": {"d": 5, "rho": None}, "seeds": [0, 1], "model": {"name": "softmax"}},
    {"name": "b", "task": {"d": 5, "noise": 0.5}, "seeds": [7], "model": {"name": "linear attn"}},
)
FACTS = {"run_digest": "x", "last_step": 9, "n_saved": 2, "n_planned": 2, "complete": 1}


def runs(*recipes: dict) -> xr.Dataset:
    """What a study knows of runs with these recipes, from its store."""
    store = MemoryStore()
    group = zarr.create_group(store, zarr_format=3)
    names = [recipe["name"] for recipe in recipes]
    facts = [FACTS | {"settings": recipe, "n_diverged": 0} for recipe in recipes]
    settings.write_runs(group, names, [f"/runs/{name}" for name in names], facts)
    return settings.decoded(xr.open_zarr(store, consolidated=False, chunks=None))


def mmse() -> xr.Dataset:
    """A result of the probe `mmse` over two runs of two seeds and one, at two steps."""
    labels = [[0.0, 1.0], [7.0, np.nan]]
    loss = np.arange(8.0).reshape(2, 2, 2)
    nearest = np.array([[[0, 1], [1, np.nan]], [[0, 0], [np.nan, np.nan]]])
    codes = np.array([[[0, 0], [0, 1]], [[0, 0], [2, 2]]], dtype=np.int16)
    flags = {"flag_values": [0, 1, 2], "flag_meanings": "defined no_live_head not_in_this_run"}
    names = {"flag_values": [0, 1], "flag_meanings": "adaptive fixed_in_advance"}
    dims = ("run", "seed", "step")
    return xr.Dataset(
        {
            "loss": (dims, loss, {"units": "1"}),
            "nearest": (dims, nearest, {"units": "1", "label_of": "strategy"}),
            "holds": (dims, nearest, {"units": "1"}),
            "since": (("run", "seed"), [[9.0, np.nan], [np.nan, np.nan]], {"units": "step"}),
            "undefined": (dims, codes, flags),
        },
        coords={
            "run": [0, 1],
            "step": [0, 9],
            "strategy": ("strategy", [0, 1], names),
            "last_step": ("run", [9, 0]),
            "seed_label": (("run", "seed"), labels),
        },
        attrs={"probe": "mmse", "statement": "it adapts"},
    )


def test_settings_are_numbers_or_text() -> None:
    found = runs(*RECIPES)
    assert found["task.d"].values.tolist() == [5, 5]
    np.testing.assert_array_equal(found["task.noise"], [np.nan, 0.5])
    assert np.isnan(found["task.rho"]).all()
    assert found["model.name"].values.tolist() == ["softmax", "linear attn"]
    assert found["seeds"].values.tolist() == ["[0, 1]", "[7]"]
    assert found["recipe"].values.tolist() == ["a", "b"]
    assert found["run_path"].values.tolist() == ["/runs/a", "/runs/b"]
    assert settings.differing(found) == ["model.name", "recipe", "seeds", "task.noise"]


def test_a_setting_that_is_a_number_in_one_run_and_text_in_another_is_text() -> None:
    found = runs({"name": "a", "x": 1}, {"name": "b", "x": "auto"}, {"name": "c", "x": None})
    assert found["x"].values.tolist() == ["1", "auto", ""]


def test_rows() -> None:
    found = table(runs(*RECIPES), {"mmse": mmse()})
    assert found["run"].tolist() == ["a", "a", "b"]
    assert found["seed"].tolist() == [0, 1, 7]
    assert found["step"].tolist() == [9, 9, 0]
    assert found["loss"].tolist() == [1, 3, 4]
    assert found["nearest"].tolist() == ["fixed in advance", "", "adaptive"]
    assert found["undefined"].tolist() == ["", "no live head", ""]
    assert found["model.name"].tolist() == ["softmax", "softmax", "linear attn"]
    assert list(found)[:7] == ["run", "probe", "seed", "step", "holds", "since", "undefined"]
    few = table(runs(*RECIPES), {"mmse": mmse()}, all_columns=False)
    assert set(found) - set(few) >= {"task.d", "task.rho", "run_path"}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([{"d": 5}, {"d": 7}], "d"),
        ([{"d": 5}, {"d": 5}], None),
        ([{"d": 5, "e": 1}, {"d": 7, "e": 2}], None),
        ([{"d": 5, "seeds": [0]}, {"d": 7, "seeds": [1]}], "d"),
        ([{"d": 5}, {}], "d"),
        ([{"d": 5, "weights": "x"}, {"d": 7, "weights": "y"}], "d"),
    ],
)
def test_the_one_setting_that_varies(others: list[dict], expected: str | None) -> None:
    recipes = [{"name": str(number), **each} for number, each in enumerate(others)]
    assert varied(runs(*recipes)) == expected


def test_figures_have_names_of_labels_and_the_setting_that_varies() -> None:
    known = runs({"name": "a", "x": 0.1}, {"name": "b", "x": 0.3})
    shown = figure_data(known, mmse())
    assert shown["nearest"].attrs["flag_meanings"] == "adaptive fixed_in_advance"
    assert shown["x"].values.tolist() == [0.1, 0.3]
    assert shown.attrs["x_label"] == "x"
    assert set(shown.data_vars) == {"loss", "nearest", "holds", "since"}


def test_a_probe_that_is_not_there_any_more_has_verdicts_alone() -> None:
    found = at_the_end(mmse().assign_attrs(probe="of_a_package_that_was_removed"))
    assert set(found.data_vars) == {"holds", "since", "undefined"}
