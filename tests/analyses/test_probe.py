import json

import numpy as np
import pydantic
import pytest
import xarray as xr

from mechicl import analyses
from mechicl.analyses.probe import (
    BUILTIN,
    Probe,
    applies_always,
    probe,
    since,
    undefined_codes,
    verdict,
)
from mechicl.errors import InputError, NothingToAnalyseError, SchemaError
from mechicl.schema import Var
from tests import trajectories


def series(*rows: list[float], steps: list[int] | None = None) -> xr.DataArray:
    steps = steps if steps is not None else [10 * i for i in range(len(rows[0]))]
    return xr.DataArray(np.array(rows, dtype=float), dims=("seed", "step"), coords={"step": steps})


@pytest.mark.parametrize(
    ("holds", "first"),
    [
        ([1, 1, 1, 1], 0),
        ([0, 1, 1, 1], 10),
        ([1, 1, 0, 1], 30),
        ([0, 0, 0, 1], 30),
        ([1, 1, 1, 0], np.nan),
        ([0, 0, 0, 0], np.nan),
        ([1, np.nan, 1, 1], 20),
        ([1, 1, 1, np.nan], np.nan),
        ([np.nan] * 4, np.nan),
    ],
)
def test_since_is_the_first_step_of_the_last_run_of_yes(holds, first):
    np.testing.assert_array_equal(since(series(holds)).values, [first])


def test_since_reads_steps_not_positions_and_seeds_apart():
    holds = series([0, 1, 1], [0, 0, 0], [1, 1, 1], steps=[3, 7, 1000])
    np.testing.assert_array_equal(since(holds).values, [7, np.nan, 3])


def test_the_first_reason_counts():
    true, false = (xr.full_like(series([0, 0]), value, dtype=bool) for value in (True, False))
    codes = undefined_codes({"a": false, "b": true, "c": true})
    np.testing.assert_array_equal(codes.values, [[2, 2]])
    assert codes.dtype == np.int8
    np.testing.assert_array_equal(undefined_codes({"a": false}).values, [[0, 0]])


def test_verdict_is_nan_where_blocked():
    yes = xr.DataArray([[True, False, True]], dims=("seed", "step"))
    blocked = xr.DataArray([[False, False, True]], dims=("seed", "step"))
    np.testing.assert_array_equal(verdict(yes, blocked).values, [[1, 0, np.nan]])
    np.testing.assert_array_equal(verdict(yes).values, [[1, 0, 1]])


def double(trajectory: xr.Dataset, *, factor: float = 2.0) -> xr.Dataset:
    """Multiply."""
    value = trajectory["score_scale"] * factor
    zero = trajectory["W_Q"].sum(("layer", "head", "d_model", "d_head")) * 0
    return xr.Dataset({"out": value + zero, "holds": zero + 1, "undefined": zero.astype("int8")})


def make(**changes: object) -> Probe:
    fields = {
        "name": "double",
        "compute": double,
        "needs": {name: Var((), "1", name) for name in ("score_scale",)}
        | {"W_Q": Var(("seed", "step", "layer", "head", "d_model", "d_head"), "1", "queries")},
        "gives": {"out": Var(("seed", "step"), "nat", "twice", 0, 10)},
        "statement": "it does",
        "undefined": ("never",),
        "headline": ("out",),
        "applies": applies_always,
        "references": ("somewhere", "elsewhere"),
        "forward": False,
        "by_step": True,
    }
    return Probe(**(fields | changes))


@pytest.fixture
def trajectory() -> xr.Dataset:
    return trajectories.from_scales([0.1, -0.1], [1.0, -1.0])


def test_a_result_is_stamped_with_units_and_provenance(trajectory):
    result = make()(trajectory, factor=3)
    assert result["out"].attrs == {"units": "nat", "long_name": "twice"}
    assert result["since"].attrs["units"] == "step"
    assert result["undefined"].attrs["flag_meanings"] == "defined never"
    assert result.attrs == {
        "probe": "double",
        "parameters": '{"factor": 3.0}',
        "mechicl_version": "0.1.0",
        "run_digest": "made-by-hand",
        "references": "somewhere; elsewhere",
        "statement": "it does",
        "n_undefined": '{"never": 0}',
    }


def test_a_probe_sees_what_it_declares_and_nothing_else(trajectory):
    with pytest.raises(KeyError, match="W_Q"):
        make(needs={"score_scale": Var((), "1", "scale")})(trajectory)


def test_settings_are_checked_and_all_faults_named(trajectory):
    with pytest.raises(InputError, match=r"factr.*did you mean 'factor'"):
        make()(trajectory, factr=1)
    with pytest.raises(InputError, match=r"probe 'double': factor: .*given: 'x'"):
        make()(trajectory, factor="x")
    with pytest.raises(InputError, match="factor"):
        make()(trajectory, factor=float("nan"))
    assert make().resolve({}) == {"factor": 2.0}
    assert issubclass(make().parameters, pydantic.BaseModel)


def test_input_that_does_not_fit_is_refused_before_anything_is_computed(trajectory):
    wrong = trajectory.copy()
    wrong["W_Q"] = wrong["W_Q"].isel(layer=0).assign_attrs(units="nat")
    with pytest.raises(SchemaError, match=r"input of probe 'double'.*dims.*'nat', not '1'"):
        make()(wrong)


def test_output_that_breaks_its_declaration_is_refused(trajectory):
    with pytest.raises(SchemaError, match=r"output of probe 'double'.*outside \[0, 10\]"):
        make()(trajectory, factor=20)
    undeclared = {"out": Var(("seed",), "1", "other dims")}
    with pytest.raises(SchemaError, match="has dims"):
        make(gives=undeclared)(trajectory)
    with pytest.raises(SchemaError, match="'more' is missing"):
        make(gives={"more": Var(("seed",), "1", "x")})(trajectory)


def test_a_run_whose_arrays_have_other_axes_is_no_run_for_the_probe(trajectory):
    """Models of other kinds have parameters of the same names."""
    other = trajectory.assign(W_Q=trajectory["W_Q"].isel(layer=0, drop=True))
    said = make().objection(other)
    assert said is not None
    assert "W_Q has axes" in said
    assert "reads one of axes seed, step, layer" in said
    assert make().objection(trajectory.transpose(...)) is None
    assert make().objection(trajectory.transpose("step", ...)) is None


def test_a_probe_says_why_it_does_not_apply(trajectory):
    with pytest.raises(NothingToAnalyseError, match="the run has no W_Q") as caught:
        make()(trajectory.drop_vars("W_Q"))
    assert caught.value.exit_code == 3
    with pytest.raises(NothingToAnalyseError, match="does not apply: because"):
        make(applies=lambda _: "because")(trajectory)


def test_a_forward_probe_needs_a_forward(trajectory):
    with pytest.raises(InputError, match="needs a Forward"):
        analyses.get("approximate_loss")(trajectory)


def test_outputs_of_a_probe_that_only_measures():
    assert set(make(statement=None, undefined=()).outputs) == {"out"}
    assert make().summary == "Multiply."


def test_every_builtin_is_found_by_its_name():
    assert set(BUILTIN) <= set(analyses.names())
    for name in BUILTIN:
        record = analyses.get(name)
        assert record.name == name == record.compute.__name__
        assert record.compute.__module__ == f"mechicl.analyses.{name}"
    assert analyses.get("sign-matching") is analyses.get("sign_matching")
    with pytest.raises(InputError, match="did you mean 'sign_matching'"):
        analyses.get("sign_matchin")


def test_a_taken_name_is_refused_naming_its_holder():
    def sign_matching(trajectory: xr.Dataset) -> xr.Dataset:
        return trajectory

    with pytest.raises(InputError, match=r"already registered by mechicl\.analyses\.sign_matching"):
        probe(needs={}, gives={})(sign_matching)


def test_encodings_of_a_store_do_not_reach_results(trajectory, tmp_path):
    trajectory.to_zarr(tmp_path / "in.zarr", consolidated=False, encoding={"step": {"chunks": [1]}})
    stored = xr.open_zarr(tmp_path / "in.zarr", consolidated=False)
    result = analyses.get("sign_matching")(stored)
    assert all(not result[name].encoding for name in result.variables)
    result.to_zarr(tmp_path / "out.zarr", consolidated=False)
    again = xr.open_zarr(tmp_path / "out.zarr", consolidated=False).load()
    xr.testing.assert_identical(again, result)
    assert json.loads(again.attrs["parameters"]) == {"dummy_threshold": 0.2}
