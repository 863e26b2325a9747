"""What holds of every registered probe, present and future; each test counts what it asserted."""

import inspect
import json
from functools import cache
from importlib import import_module

import matplotlib.figure
import numpy as np
import pytest
import xarray as xr

from mechicl import analyses, plots
from mechicl.analyses.probe import applies_always, since
from mechicl.errors import InputError
from tests import trajectories
from tests.analyses.toy import CHEAP, MARKOV, POOLED, SUITED, forward_for, suited

NAMES = analyses.names()
SEEDS, STEPS, HEADS = 3, 6, 4
DIVERGED = 3
WITHOUT_MODELS = ("loss_landscape",)
"""Probes with a result apart from the models, which their figures show without any."""


def run(name: str, trajectory: xr.Dataset, **settings: object) -> xr.Dataset:
    record = analyses.get(name)
    given = CHEAP.get(name, {}) | settings
    return record(suited(name, trajectory), forward_for(name), **given)


def awkward() -> xr.Dataset:
    """Return a run with everything in it: learning, a diverged seed, a dead head, a dead model."""
    trajectory = trajectories.learning(SEEDS, STEPS, HEADS)
    trajectory = trajectories.poison(trajectory, seed=1, from_index=DIVERGED)
    for weight in trajectories.WEIGHTS:
        trajectory[weight].values[2, 1, 0, 0] = 0.0
        trajectory[weight].values[2, 2] = 0.0
    return trajectory


@cache
def result_of(name: str) -> xr.Dataset:
    """Return the result on the awkward run; tests read it and change nothing."""
    return run(name, awkward())


def test_there_are_probes_to_test():
    assert len(NAMES) >= 10
    assert set(SUITED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_untouched(name):
    trajectory = suited(name, awkward())
    before = trajectory.copy(deep=True)
    analyses.get(name)(trajectory, forward_for(name), **CHEAP.get(name, {}))
    xr.testing.assert_identical(trajectory, before)


@pytest.mark.parametrize("name", NAMES)
def test_attributes_are_the_declared_ones(name):
    outputs, result, counted = analyses.get(name).outputs, result_of(name), 0
    assert {str(key) for key in result.data_vars} <= set(outputs)
    for key, var in outputs.items():
        assert result[key].attrs == var.attrs or key in result.coords
        assert result[key].attrs["units"] == var.units
        assert result[key].dims == var.dims
        counted += 1
    assert counted >= len(analyses.get(name).gives) >= 1
    assert "stray" not in result.attrs
    assert result["step"].attrs == {"units": "step", "long_name": "training step"}
    # An axis that is not of the trajectory is declared.
    assert {*result.coords} <= {"seed", "step", "head", "layer", "seed_other"} | set(outputs)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_in_their_ranges_and_float64(name):
    outputs, result, counted = analyses.get(name).outputs, result_of(name), 0
    for key, var in outputs.items():
        values = np.asarray(result[key].values, dtype=float)
        assert not np.isinf(values).any()
        if var.minimum is not None:
            assert np.nanmin(values) >= var.minimum
            counted += 1
        if var.maximum is not None:
            assert np.nanmax(values) <= var.maximum
            counted += 1
        if np.issubdtype(result[key].dtype, np.floating):
            assert result[key].dtype == np.float64
    bounds = [bound for var in outputs.values() for bound in (var.minimum, var.maximum)]
    assert counted == len(bounds) - bounds.count(None) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_value_is_missing_where_a_reason_is_given_and_nowhere_else(name):
    result = result_of(name)
    missing = xr.zeros_like(result["undefined"], dtype=bool)
    for key, variable in result.data_vars.items():
        if {"seed", "step"} <= {*variable.dims} and key != "undefined":
            rest = [dim for dim in variable.dims if dim not in ("seed", "step")]
            missing = missing | variable.isnull().any(rest)
    np.testing.assert_array_equal(missing.values, result["undefined"].values != 0)
    assert 0 < int(missing.sum()) < missing.size
    counts = json.loads(result.attrs["n_undefined"])
    assert set(counts) == set(analyses.get(name).undefined)
    assert sum(counts.values()) == int(missing.sum())
    diverged = result["step"] >= awkward()["step"][DIVERGED]
    assert counts["nonfinite_parameters"] == int(diverged.sum()) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_diverged_weights_are_undefined_whatever_not_finite_means(name):
    for value in (np.nan, np.inf, -np.inf):
        trajectory = trajectories.learning(SEEDS, STEPS, HEADS)
        trajectory["W_K"].values[0, -1, 0, 1, 2, 3] = value
        result = run(name, trajectory)
        reasons = analyses.get(name).undefined
        assert reasons[int(result["undefined"].values[0, -1]) - 1] == "nonfinite_parameters"
        assert json.loads(result.attrs["n_undefined"])["nonfinite_parameters"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_holds_and_since_agree(name):
    result = result_of(name)
    if analyses.get(name).statement is None:
        assert "holds" not in result
        return
    assert set(np.unique(result["holds"].values[np.isfinite(result["holds"].values)])) <= {0, 1}
    xr.testing.assert_equal(result["since"], since(result["holds"]))
    for seed, first in enumerate(result["since"].values):
        holds = result["holds"].isel(seed=seed)
        if np.isnan(first):
            assert holds.values[-1] != 1
        else:
            assert (holds.sel(step=slice(first, None)) == 1).all()
            before = holds.sel(step=slice(None, first - 1)).values
            assert before.size == 0 or before[-1] != 1
    assert np.isnan(result["since"].values[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_learning_run_ends_well(name):
    result = run(name, trajectories.learning(SEEDS, 8, 2))
    if "holds" in result:
        np.testing.assert_array_equal(result["holds"].values[:, -1], 1)
        assert np.isfinite(result["since"].values).all()


@pytest.mark.parametrize("name", NAMES)
def test_order_of_heads_and_of_seeds_does_not_matter(name):
    trajectory, heads, seeds = awkward(), [2, 0, 3, 1], [2, 0, 1]
    result = result_of(name)
    for dim, order in (("head", heads), ("seed", seeds)):
        other = run(name, trajectories.permuted(trajectory, dim, order))
        expected = result
        for along in (dim, f"{dim}_other"):  # what compares seeds has two axes of them
            if along in result.dims:
                expected = trajectories.permuted(expected, along, order)
        xr.testing.assert_allclose(other, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_basis_inside_a_head_does_not_matter(name):
    settings = {"omega": [[[0.2, -0.19], [0.3, 0.1]]], "mu": [[[2.1, -2.2], [1.0, -1.0]]]}
    one, other = (trajectories.from_scales(**settings, basis_seed=seed) for seed in (0, 5))
    assert not np.allclose(one["W_Q"], other["W_Q"])
    xr.testing.assert_allclose(run(name, one), run(name, other), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_twice_the_same_is_the_same(name):
    xr.testing.assert_identical(run(name, awkward()), result_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_provenance(name):
    record, result = analyses.get(name), result_of(name)
    parameters = json.loads(result.attrs["parameters"])
    # JSON has lists for tuples.
    assert parameters == json.loads(json.dumps(record.resolve(CHEAP.get(name, {}))))
    assert result.attrs["probe"] == name
    assert result.attrs["run_digest"] == "made-by-hand"
    assert result.attrs["references"] == "; ".join(record.references) != ""
    assert all(isinstance(value, str) for value in result.attrs.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_names_parameters_and_outputs(name):
    record = analyses.get(name)
    text = inspect.getdoc(record.compute) or ""
    assert "misleads" in text and "Undefined" in text and "References" in text
    assert record.summary.endswith(".")
    for parameter in record.parameters.model_fields:
        assert f"\n{parameter}\n" in text
    for output in record.gives:
        assert f"`{output}`" in text
    if record.statement:
        assert "`holds`" in text


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_bounds(name):
    record, counted = analyses.get(name), 0
    defaults = record.resolve({})
    for parameter, default in defaults.items():
        for beyond in (-1, True, float("nan"), float("inf")):
            if beyond is True and isinstance(default, bool):
                continue
            with pytest.raises(InputError, match=f"{parameter}: "):
                record.resolve({parameter: beyond})
        assert record.resolve({parameter: default}) == defaults
        counted += 1
    assert counted == len(inspect.signature(record.compute).parameters) - 1 - record.forward


@pytest.mark.parametrize("name", NAMES)
def test_a_result_survives_a_store(name, tmp_path):
    result = result_of(name)
    result.to_zarr(tmp_path / "result.zarr", consolidated=False)
    again = xr.open_zarr(tmp_path / "result.zarr", consolidated=False).load()
    xr.testing.assert_identical(again, result)


@pytest.mark.parametrize("name", NAMES)
def test_runs_that_a_probe_says_nothing_about(name):
    record = analyses.get(name)
    if name in (*MARKOV, *POOLED):
        assert "the run has no" in str(record.objection(awkward()))
        return
    deep = xr.concat(
        [awkward()] * 2, "layer", data_vars="minimal", coords="minimal", compat="override"
    )
    wide = suited(name, trajectories.from_scales(0.1, 1.0)).assign(d=4)
    if record.applies is applies_always:
        # It evaluates the model and looks at no circuit, so that any will do.
        assert record.forward
        assert record.objection(deep) is record.objection(wide) is None
    else:
        assert "layers" in str(record.objection(suited(name, deep)))
        assert "d_model" in str(record.objection(wide))
    slanted = suited(name, trajectories.from_scales(0.1, 1.0, isotropic=0))
    assert (record.objection(slanted) is None) == ("isotropic" not in record.needs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["awkward", "nothing defined"])
def test_the_figure_draws(name, kind, tmp_path):
    result = result_of(name)
    if kind == "nothing defined":
        trajectory = trajectories.learning(2, 1, 2)
        for seed in range(2):
            trajectory = trajectories.poison(trajectory, seed=seed, from_index=0)
        result = run(name, trajectory)
    figure = plots.draw(result)
    assert isinstance(figure, matplotlib.figure.Figure)
    figure.savefig(tmp_path / "figure.png", dpi=30)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    if kind == "nothing defined" and name in WITHOUT_MODELS:
        assert "undefined: seeds 0, 1" in figure.get_suptitle().replace("\n", " ")
    elif kind == "nothing defined":
        assert "undefined" in texts


@pytest.mark.parametrize("name", NAMES)
def test_headlines_are_outputs_that_a_table_can_show(name):
    record = analyses.get(name)
    assert record.headline
    for variable in record.headline:
        assert record.outputs[variable].dims in (("seed", "step"), ("seed", "step", "head"))


@pytest.mark.parametrize("name", NAMES)
def test_reading_in_parts_changes_nothing(name, monkeypatch):
    record, read = analyses.get(name), []
    if record.forward or not record.by_step:
        return
    monkeypatch.setattr(import_module("mechicl.analyses.probe"), "_PART_BYTES", 1)

    def load(part):
        read.append(part.sizes["step"])
        return part.compute()

    result = record.run(suited(name, awkward()), {}, load=load)
    assert read == [1] * STEPS
    xr.testing.assert_identical(result, result_of(name))
