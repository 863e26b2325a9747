"""Heads in an order that seeds share: a permutation of a seed's heads changes no summary."""

from collections.abc import Callable

import numpy as np
import pytest
import xarray as xr

from mechicl import analyses
from mechicl.studies.heads import aligned_heads, last_steps
from tests import trajectories
from tests.analyses import markov_toy

ORDER = [2, 0, 1]


def permuted(result: xr.Dataset, seed: int) -> xr.Dataset:
    """A result in which the heads of one seed are in another order."""
    out = result.copy(deep=True)
    for name, variable in out.data_vars.items():
        if "head" in variable.dims and "seed" in variable.dims:
            moved = variable.isel(seed=seed).isel(head=ORDER)
            out[name].values[variable.get_axis_num("seed") * (slice(None),) + (seed,)] = moved
    return out


def circuits() -> xr.Dataset:
    return analyses.get("circuits")(trajectories.learning(n_seeds=3, n_heads=3))


def roles() -> xr.Dataset:
    omega = np.array([[[0.2, -0.2, 0.001]], [[0.1, -0.3, 0.2]]])
    made = trajectories.from_scales(omega, np.sign(omega) * np.abs(omega) * 10)
    return analyses.get("head_roles")(made)


def spans() -> xr.Dataset:
    toy = markov_toy.learning(3)
    return analyses.get("attention_spans")(toy.trajectory, toy.forward(), n_prompts=2)


def values() -> xr.Dataset:
    toy = markov_toy.learning(3)
    return analyses.get("value_alignment")(toy.trajectory, toy.forward())


def places() -> xr.Dataset:
    toy = markov_toy.learning(3)
    return analyses.get("head_permutation")(toy.trajectory, toy.forward(), n_prompts=2)


CASES: dict[str, tuple[Callable[[], xr.Dataset], str]] = {
    "circuits": (circuits, "omega"),
    "head_roles": (roles, "role"),
    "attention_spans": (spans, "mass"),
    "value_alignment": (values, "cosine"),
    "head_permutation": (places, "mass"),
}


def summary(result: xr.Dataset, name: str) -> np.ndarray:
    """The mean over seeds of a variable at the last step."""
    return last_steps(result)[name].mean("seed").values


@pytest.mark.parametrize("probe", CASES)
def test_a_permutation_of_the_heads_of_a_seed_changes_no_summary(probe: str) -> None:
    make, name = CASES[probe]
    result = make()
    other = permuted(result, seed=1)
    assert not np.allclose(summary(result, name), summary(other, name)), "nothing to undo"
    before, after = aligned_heads(result), aligned_heads(other)
    assert "head" not in before.dims
    for each in before.data_vars:
        np.testing.assert_array_equal(before[each], after[each])
    np.testing.assert_allclose(summary(before, name), summary(after, name))
    assert np.isfinite(summary(before, name)).all()


def test_the_heads_of_tasks_go_by_the_tasks_that_they_serve() -> None:
    rng = np.random.default_rng(0)
    serves = np.array([[1, 0], [0, 1], [1, 1]], dtype=float)
    result = xr.Dataset(
        {
            "serves": (("seed", "step", "head", "response"), np.tile(serves, (2, 1, 1, 1))),
            "omega": (("seed", "step", "head", "response"), rng.normal(size=(2, 1, 3, 2))),
            "n_tasks": (("seed", "step", "head"), np.tile(serves.sum(-1), (2, 1, 1))),
        }
    )
    found = aligned_heads(result)
    assert found["n_tasks"].isel(seed=0, step=0).values.tolist() == [2, 1, 1]
    assert found["serves"].isel(seed=0, step=0).values.tolist() == [[1, 1], [1, 0], [0, 1]]
    xr.testing.assert_identical(found, aligned_heads(permuted(result, seed=1)))


def test_omega_decides_and_then_mu() -> None:
    omega = xr.DataArray([[[0.1, 0.3, 0.1, np.nan]]], dims=("seed", "step", "head"))
    mu = xr.DataArray([[[1.0, 2.0, 3.0, 9.0]]], dims=("seed", "step", "head"))
    found = aligned_heads(xr.Dataset({"omega": omega, "mu": mu}))
    assert found["mu"].values[0, 0].tolist() == [2.0, 3.0, 1.0, 9.0], "no number: at the end"
    assert found.attrs["heads_by"] == "omega, the largest first"


def test_the_order_is_that_of_the_last_step() -> None:
    omega = xr.DataArray([[[0.3, 0.1], [0.1, 0.3]]], dims=("seed", "step", "head"))
    found = aligned_heads(xr.Dataset({"omega": omega}))
    assert found["omega"].values.tolist() == [[[0.1, 0.3], [0.3, 0.1]]]


def test_heads_that_tie_have_no_place() -> None:
    toy = markov_toy.learning(2)
    result = analyses.get("attention_spans")(toy.trajectory, toy.forward(), n_prompts=2)
    result["mass"].values[1] = 1 / 3
    found = aligned_heads(result)
    assert np.isfinite(found["mass"].isel(seed=0)).all()
    assert np.isnan(found["mass"].isel(seed=1)).all()


def test_what_has_no_common_order_is_left_out_and_named() -> None:
    data = xr.DataArray(np.ones((2, 1, 3, 4)), dims=("seed", "step", "head", "pos"))
    result = xr.Dataset({"recovered": data, "whole": data.sum(["head", "pos"])})
    found = aligned_heads(result)
    assert list(found.data_vars) == ["whole"]
    assert found.attrs["not_aligned"] == "recovered"


def test_each_run_has_its_own_last_step() -> None:
    omega = np.arange(12.0).reshape(2, 1, 3, 2)
    omega[0, :, 2] = np.nan
    result = xr.Dataset(
        {"omega": (("run", "seed", "step", "head"), omega)},
        coords={"step": [0, 5, 9], "run": [4, 7], "last_step": ("run", [5, 9])},
    )
    assert last_steps(result)["omega"].values.tolist() == [[[2, 3]], [[10, 11]]]
    assert last_steps(result)["run"].values.tolist() == [4, 7]
    assert aligned_heads(result)["omega"].isel(run=1, step=2).values.tolist() == [[11, 10]]
