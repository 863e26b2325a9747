import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from mechicl.checkpoints import allocate, layout
from mechicl.checkpoints.layout import CONFIG, TRAJECTORY, resume_name
from mechicl.errors import InputError
from mechicl.schema import Var
from tests.checkpoints.common import B, W, make_plan, write


def test_plain_xarray_opens_it_without_a_warning(tmp_path):
    plan = make_plan()
    write(tmp_path / "run", plan, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = xr.open_zarr(tmp_path / "run" / TRAJECTORY).load()
    assert dataset["W_Q"].dims == ("seed", "step", "head", "d_model")
    assert dataset["W_Q"].dtype == np.float32
    assert dataset["loss"].dims == ("seed", "log_step")
    assert {name: dataset[name].dtype for name in ("seed", "step", "log_step", "n_saved")} == {
        name: np.int64 for name in ("seed", "step", "log_step", "n_saved")
    }
    np.testing.assert_array_equal(dataset["step"], plan.steps)
    np.testing.assert_array_equal(dataset["log_step"], np.arange(100))
    assert dataset["sigma"] == 0.25
    assert dataset["n_saved"] == 3
    assert np.isnan(dataset["diverged_at"]).all()
    assert np.isnan(dataset["W_Q"][:, 3:]).all()
    assert np.isfinite(dataset["W_Q"][:, :3]).all()
    units = {name: dataset[name].attrs["units"] for name in dataset.variables}
    assert units == {
        "seed": "1",
        "step": "step",
        "log_step": "step",
        "W_Q": "1",
        "b_Q": "logit",
        "loss": "1",
        "diverged_at": "step",
        "sigma": "nat",
        "n_saved": "1",
    }
    assert all(dataset[name].attrs["long_name"] for name in dataset.variables)
    assert dataset.attrs["schema_version"] == 1
    assert dataset.attrs["run_digest"] == "abc"


def test_every_array_is_checksummed_and_filled_with_what_cannot_pass_for_a_value(tmp_path):
    allocate(tmp_path, make_plan())
    found = {}
    for path in (tmp_path / TRAJECTORY).glob("*/zarr.json"):
        metadata = json.loads(path.read_text())
        assert [codec["name"] for codec in metadata["codecs"]] == ["bytes", "crc32c"]
        found[path.parent.name] = metadata["fill_value"]
    integers = {"seed", "step", "log_step", "n_saved"}
    assert found == {name: -1 if name in integers else "NaN" for name in found}
    assert len(found) == 9


def test_planned_size_is_the_size_on_disk(tmp_path):
    plan = make_plan(steps=range(600))
    run = tmp_path / "run"
    write(run, plan, 600)
    files = [path for path in (run / TRAJECTORY).rglob("*") if path.is_file()]
    assert len(files) == plan.n_files
    assert 1 + sum(path.is_dir() for path in (run / TRAJECTORY).rglob("*")) == plan.n_folders
    assert sum(path.stat().st_size for path in files if path.name != "zarr.json") == plan.nbytes
    assert {path.name for path in run.iterdir()} >= {CONFIG, resume_name(599)}


def test_chunks_stay_below_both_limits():
    def chunks(n_steps, **sizes):
        plan = replace(make_plan(range(n_steps)), sizes={"head": 2, "d_model": 3, **sizes})
        return plan.arrays()["W_Q"].chunks, plan.arrays()["b_Q"].chunks

    assert chunks(10_000)[0] == (2, 250, 2, 3)
    assert chunks(300)[0] == (2, 150, 2, 3)
    assert chunks(3)[0] == (2, 3, 2, 3)
    large, small = chunks(10_000, d_model=100_000)
    assert large == (2, 10, 2, 100_000)
    assert small == (2, 10)  # all chunks fill up together
    huge, _ = chunks(10, d_model=3_000_000)
    assert huge[1] == 1
    assert np.prod(huge) * 4 <= layout.MAX_CHUNK_BYTES
    assert make_plan(range(100_000)).arrays()["loss"].chunks[1] <= 4096


def test_a_training_of_no_steps_can_be_saved(tmp_path):
    plan = make_plan(steps=[0])
    write(tmp_path / "run", plan, 1)
    assert xr.open_zarr(tmp_path / "run" / TRAJECTORY).sizes["log_step"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": np.array([0, 5, 5])}, "do not increase"),
        ({"steps": np.array([-1, 5])}, "do not increase"),
        ({"steps": np.array([0.0, 5.0])}, "not a list of integers"),
        ({"steps": np.array([], dtype=int)}, "not a list of integers"),
        ({"seeds": (1, 1)}, "not distinct"),
        ({"seeds": ()}, "not distinct"),
        ({"seeds": (-1,)}, "not distinct"),
        ({"sizes": {"head": 2}}, "no sizes from 1 on for d_model of W_Q"),
        ({"parameters": {}}, "no parameters"),
        ({"parameters": {"W_Q": Var(("step", "seed"), "1", "x")}}, "start with seed, step"),
        ({"parameters": {"loss": B}}, "'loss' is the name of"),
        ({"parameters": {"d_model": B}}, "'d_model' is the name of"),
        ({"parameters": {"a/b": B}}, "'a/b' cannot be the name"),
        ({"constants": {"W_Q": (Var((), "1", "x"), 1.0)}}, "parameter and constant at once"),
        ({"constants": {"d": (Var(("step",), "1", "x"), [1.0])}}, "constant d has dims step"),
        ({"constants": {"d": (Var(("head",), "1", "x"), 1.0)}}, "constant d has 0 axes and dims"),
        ({"attrs": {"a": np.int64(3)}}, "not JSON"),
        ({"attrs": {"a": float("nan")}}, "not JSON"),
        ({"attrs": {"n_saved": 3}}, "attrs n_saved are set by the store"),
        ({"loss": B}, "dims of loss"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(make_plan(), **change)


def test_all_problems_of_a_plan_are_listed():
    with pytest.raises(InputError) as caught:
        replace(make_plan(), seeds=(), parameters={"loss": W}, sizes={})
    assert str(caught.value).count(";") == 2


def test_what_is_there_is_not_allocated_over(tmp_path):
    allocate(tmp_path, make_plan())
    with pytest.raises(InputError, match="is there already"):
        allocate(tmp_path, make_plan())
