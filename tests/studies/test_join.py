"""Parts of runs of other steps, sizes and names, joined: every number where it belongs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import LocalStore

from mechicl.errors import InputError
from mechicl.schema import flag_names
from mechicl.studies import join as joining
from mechicl.studies.parts import read_head, write_part

REASONS = {"flag_values": [0, 1], "flag_meanings": "defined no_live_head", "units": "1"}
REFERENCES = ("zero bayes", "bayes ridge")


def result(number: int, steps: list[int], seeds: list[int], heads: int) -> xr.Dataset:
    """A result whose every number says which run, seed, step and head it is of."""
    sizes = (len(seeds), len(steps), heads)
    at = np.array(seeds)[:, None, None] * 1e4 + np.array(steps)[None, :, None] * 10
    omega = number * 1e6 + at + np.arange(heads)
    names = {"flag_values": [0, 1], "flag_meanings": REFERENCES[number % 2], "units": "1"}
    return xr.Dataset(
        {
            "omega": (("seed", "step", "head"), omega, {"units": "1", "long_name": "scale"}),
            "undefined": (("seed", "step"), np.zeros(sizes[:2], np.int8), REASONS),
            "since": (("seed",), np.array(seeds, dtype=float), {"units": "step"}),
            "nearest": (("seed", "step"), np.ones(sizes[:2]), {"label_of": "reference"}),
            "loss": (("reference",), np.array([0.0, 1.0]), {"units": "1"}),
            "total": ((), np.array(number), {"units": "1"}),
        },
        coords={
            "seed": ("seed", seeds, {"units": "1"}),
            "step": ("step", steps, {"units": "step", "long_name": "training step"}),
            "reference": ("reference", np.arange(2), names),
        },
        attrs={
            "probe": "made_up",
            "run_digest": str(number),
            "n_undefined": json.dumps({"no_live_head": number}),
        },
    )


RUNS = (([0, 10, 30], [0, 3], 2), ([0, 20, 30, 40], [5], 4))


@pytest.fixture
def parts(tmp_path: Path) -> list[joining.Part]:
    paths = []
    for number, shape in enumerate(RUNS):
        paths.append(tmp_path / f"{number}.safetensors")
        write_part(paths[-1], result(number, *shape))
    return [joining.open_part(10 * number, path) for number, path in enumerate(paths)]


def joined(parts: list[joining.Part], tmp_path: Path, join: str, **options: int) -> xr.Dataset:
    store = LocalStore(tmp_path / "joined.zarr")
    group = zarr.open_group(store, mode="w", zarr_format=3)
    joining.write_joined(group, parts, join, **options)
    return xr.open_zarr(store, chunks=None, consolidated=False).load()


def test_a_part_comes_back_as_it_was(tmp_path: Path) -> None:
    given = result(1, *RUNS[1])
    write_part(tmp_path / "part", given)
    head = read_head(tmp_path / "part")
    assert head["attrs"] == given.attrs
    assert set(head["coords"]) == set(given.coords)
    part = joining.open_part(0, tmp_path / "part")
    assert part.labels["head"].size == 4
    assert part.labels["step"].values.tolist() == RUNS[1][0]


def test_outer(parts: list[joining.Part], tmp_path: Path) -> None:
    found = joined(parts, tmp_path, "outer")
    assert found["run"].values.tolist() == [0, 10]
    assert found["step"].values.tolist() == [0, 10, 20, 30, 40]
    omega = found["omega"]
    assert omega.dims == ("run", "seed", "step", "head")
    assert omega.sel(run=0, step=10).values[:, :2].tolist() == [[100, 101], [30100, 30101]]
    assert omega.sel(run=10, step=20).values[0].tolist() == [1050200, 1050201, 1050202, 1050203]
    assert int(omega.notnull().sum()) == 3 * 2 * 2 + 4 * 1 * 4, "nothing else is there"
    assert omega.attrs == {"units": "1", "long_name": "scale"}
    assert found["seed_label"].values[0].tolist() == [0, 3]
    np.testing.assert_array_equal(found["seed_label"].values[1], [5, np.nan])
    assert found["n_head"].values.tolist() == [2, 4]
    assert found["n_seed"].values.tolist() == [2, 1]
    assert found["last_step"].values.tolist() == [30, 40]
    assert found["total"].values.tolist() == [0, 1]
    assert found.attrs["n_undefined"] == '{"no_live_head": 1}'
    assert "run_digest" not in found.attrs


def test_what_a_run_has_not_is_not_said_to_be_defined(
    parts: list[joining.Part], tmp_path: Path
) -> None:
    found = joined(parts, tmp_path, "outer")
    names = flag_names(found["undefined"])
    assert names == {0: "defined", 1: "no_live_head", 2: "not_in_this_run"}
    said = found["undefined"].sel(run=0).isel(seed=0).values
    assert [names[int(code)] for code in said] == [
        "defined",
        "defined",
        "not_in_this_run",
        "defined",
        "not_in_this_run",
    ]
    assert (found["undefined"].sel(run=10).isel(seed=1) == 2).all()


def test_names_are_joined_by_name_and_codes_follow(
    parts: list[joining.Part], tmp_path: Path
) -> None:
    found = joined(parts, tmp_path, "outer")
    assert list(flag_names(found["reference"]).values()) == ["zero", "bayes", "ridge"]
    np.testing.assert_array_equal(found["loss"], [[0, 1, np.nan], [np.nan, 0, 1]])
    nearest = found["nearest"]
    assert np.nanmax(nearest.sel(run=0)) == 1, "bayes, as it was"
    assert np.nanmax(nearest.sel(run=10)) == np.nanmin(nearest.sel(run=10)) == 2, "ridge, was 1"


def test_inner(parts: list[joining.Part], tmp_path: Path) -> None:
    found = joined(parts, tmp_path, "inner")
    assert found["step"].values.tolist() == [0, 30]
    assert found["omega"].sel(run=0, step=30).values[0, :2].tolist() == [300, 301]
    assert found["omega"].sel(run=10, step=30).values[0].tolist() == [1050300 + i for i in range(4)]
    assert found["last_step"].values.tolist() == [30, 30], "of what is here"


def test_last(parts: list[joining.Part], tmp_path: Path) -> None:
    found = joined(parts, tmp_path, "last")
    assert "step" not in found.dims
    assert found["last_step"].values.tolist() == [30, 40]
    assert found["omega"].sel(run=0).values[0, :2].tolist() == [300, 301]
    assert found["omega"].sel(run=10).values[0].tolist() == [1050400 + i for i in range(4)]


def test_a_batch_at_a_time_gives_the_same(
    parts: list[joining.Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = joined(parts, tmp_path, "outer")
    monkeypatch.setattr(joining, "_BATCH_BYTES", 1)
    xr.testing.assert_identical(joined(parts, tmp_path, "outer"), whole)


def test_what_would_be_too_large_is_refused_with_its_size(
    parts: list[joining.Part], tmp_path: Path
) -> None:
    size = sum(
        math.prod(each.shape) * each.dtype.itemsize
        for each in joined(parts, tmp_path, "outer").data_vars.values()
    )
    joined(parts, tmp_path, "outer", limit=size)
    with pytest.raises(InputError, match=r"'made_up' over 2 runs would take .* \(run 2, .*step 5"):
        joined(parts, tmp_path, "outer", limit=size - 1)


def test_a_variable_that_one_run_has_not(tmp_path: Path) -> None:
    write_part(tmp_path / "0", result(0, *RUNS[0]))
    write_part(tmp_path / "1", result(1, *RUNS[1]).drop_vars(["omega", "nearest"]))
    parts = [joining.open_part(number, tmp_path / str(number)) for number in range(2)]
    found = joined(parts, tmp_path, "outer")
    assert np.isfinite(found["omega"].sel(run=0, step=30)).all()
    assert np.isnan(found["omega"].sel(run=1)).all()
    assert found["n_head"].values.tolist() == [2, 0]
