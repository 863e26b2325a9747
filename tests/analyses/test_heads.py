import numpy as np
import pytest
import xarray as xr

from mechicl import analyses, models, tasks
from mechicl.analyses import heads
from tests import trajectories


def random_weights(seed: int = 3, d_head: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (2, 3, 2)
    weights = {name: rng.normal(size=(*shape, 6, d_head)) for name in ("W_Q", "W_K", "W_V")}
    return weights | {"W_O": rng.normal(size=(*shape, d_head, 6))}


def test_circuits_are_the_papers_matrix_products():
    """The paper writes KQ = KᵀQ and OV = O V of matrices on columns, K = W_Kᵀ and so on."""
    weights = random_weights()
    trajectory = trajectories.from_weights(weights, score_scale=0.5)
    kq, ov = heads.kq_circuit(trajectory), heads.ov_circuit(trajectory)
    assert kq.dims == ("seed", "step", "layer", "head", "d_key", "d_query")
    assert ov.dims == ("seed", "step", "layer", "head", "d_out", "d_in")
    counted = 0
    for index in np.ndindex(2, 3, 2):
        q, k, v, o = (weights[f"W_{name}"][index].T for name in "QKVO")
        place = (*index[:2], 0, index[2])
        np.testing.assert_allclose(kq.values[place], 0.5 * k.T @ q, rtol=1e-12)
        np.testing.assert_allclose(ov.values[place], o @ v, rtol=1e-12)
        assert not np.allclose(kq.values[place], 0.5 * q.T @ k)
        counted += 1
    assert counted == 12


def test_scores_and_outputs_are_those_of_row_vectors():
    """z_i W_K · z_j W_Q is the score; z W_V W_O is what a token adds."""
    weights = random_weights()
    trajectory = trajectories.from_weights(weights)
    key, query = np.random.default_rng(0).normal(size=(2, 6))
    q, k, v, o = (weights[f"W_{name}"][1, 2, 0] for name in "QKVO")
    kq = heads.kq_circuit(trajectory).values[1, 2, 0, 0]
    ov = heads.ov_circuit(trajectory).values[1, 2, 0, 0]
    np.testing.assert_allclose(key @ kq @ query, (key @ k) @ (query @ q), rtol=1e-12)
    np.testing.assert_allclose(ov @ key, key @ v @ o, rtol=1e-12)


def test_scales_are_read_from_the_right_entries():
    omega, mu = np.array([[[0.3, -0.2]]]), np.array([[[1.5, 0.25]]])
    kq, ov = trajectories.ideal_circuits(omega, mu, d=3)
    kq[..., 0, 0] += 0.3  # moves the mean of three by 0.1
    ov[..., -1, :3] = 7.0
    ov[..., :3, -1] = -7.0
    found = heads.head_scales(trajectories.from_circuits(kq, ov, d=3, score_scale=0.4))
    np.testing.assert_allclose(found[0].values, omega + 0.1, rtol=1e-12)
    np.testing.assert_allclose(found[1].values, mu, rtol=1e-12)
    assert found[0].dims == found[1].dims == ("seed", "step", "head")
    assert {*found[0].coords} == {"seed", "step"}


def test_float32_parameters_give_float64_circuits():
    weights = {name: w.astype("float32") for name, w in random_weights().items()}
    kq = heads.kq_circuit(trajectories.from_weights(weights))
    exact = weights["W_K"].astype(float) @ np.swapaxes(weights["W_Q"].astype(float), -1, -2)
    assert kq.dtype == np.float64
    np.testing.assert_allclose(kq.values[:, :, 0], exact, rtol=1e-13)


def array(*values: float) -> xr.DataArray:
    return xr.DataArray(np.array([[values]], dtype=float), dims=("seed", "step", "head"))


@pytest.mark.parametrize(
    ("omega", "mu", "live"),
    [
        ([1, 0.2, 0.21, 0.2], [1, 0.2, 0.2, 0.21], [1, 0, 1, 1]),  # both at most, ends included
        ([1e-6, 2e-7], [1e-6, 2e-7], [1, 0]),  # relative to the model's own largest
        ([-1, -0.1], [-1, 0.1], [1, 0]),
        ([0, 0], [0, 0], [0, 0]),
        ([1, 0], [0, 1], [1, 1]),
        ([np.nan, 1], [1, 1], [0, 1]),
        ([1, 1], [np.inf, 1], [0, 1]),
    ],
)
def test_dummies_are_weak_in_both_scales(omega, mu, live):
    found = heads.live_heads(array(*omega), array(*mu), 0.2)
    np.testing.assert_array_equal(found.values[0, 0], np.array(live, dtype=bool))


def test_a_model_is_not_finite_where_any_weight_is_not():
    trajectory = trajectories.learning(2, 3, 2)
    assert not heads.nonfinite(trajectory).any()
    for number, name in enumerate(trajectories.WEIGHTS):
        broken = trajectory.copy(deep=True)
        broken[name].values[1, 2, 0, 1, 0, 0] = (np.nan, np.inf)[number % 2]
        np.testing.assert_array_equal(np.argwhere(heads.nonfinite(broken).values), [[1, 2]])


def test_apply_where_calls_only_for_what_is_defined():
    def function(values: np.ndarray) -> np.ndarray:
        assert values.shape == (2, 3)
        return values.sum(-1)

    values = xr.DataArray(
        np.arange(12.0).reshape(2, 2, 3), dims=("seed", "step", "head")
    ).transpose("head", "step", "seed")
    defined = xr.DataArray([[True, False], [False, True]], dims=("step", "seed"))
    out = heads.apply_where(defined, function, values)
    assert out.dims == ("seed", "step")
    np.testing.assert_array_equal(out.values, [[3, np.nan], [np.nan, 30]])
    none = heads.apply_where(defined & False, function, values)
    assert np.isnan(none.values).all()


def test_quotient_by_zero_is_undefined():
    np.testing.assert_array_equal(
        heads.quotient(array(1, 0, 3), array(2, 0, 0)).values[0, 0], [0.5, np.nan, np.nan]
    )


PATTERN_PROBES = ("circuits", "sign_matching", "zero_sum_ov", "homogeneous_kq", "head_roles")
RUNS = {
    "softmax": ("softmax_attention", {}, "linear_regression", {}),
    "linear": ("linear_attention", {}, "linear_regression", {}),
    "affine": ("normalized_attention", {"activation": "affine"}, "linear_regression", {}),
    "anisotropic": (
        "softmax_attention", {}, "linear_regression", {"covariance": {"rho": 0.5}},
    ),
    "two tasks": ("softmax_attention", {}, "multi_task_regression", {}),
    "one task": ("softmax_attention", {}, "multi_task_regression", {"supports": [range(6)]}),
}  # fmt: skip
BESIDES = {
    "softmax": {"preconditioner", "solution_manifold", "training_stages"},
    "linear": {"preconditioner"},
    "affine": {"preconditioner"},
    "anisotropic": {"preconditioner"},
    "two tasks": {"task_allocation"},
    "one task": {"preconditioner", "task_allocation"},
}


def stored(kind: str) -> xr.Dataset:
    """Return a trajectory with the parameters and constants that a run of this kind stores."""
    model_name, model_settings, task_name, task_settings = RUNS[kind]
    model, task = models.get(model_name)(**model_settings), tasks.get(task_name)(**task_settings)
    sizes = {"seed": 1, "step": 1, **model.sizes(task)}
    rng = np.random.default_rng(0)
    data = {
        name: (var.dims, rng.normal(size=[sizes[dim] for dim in var.dims]), var.attrs)
        for name, var in model.parameters(task).items()
    }
    constants = {**task.constants(), **model.constants()}
    data |= {name: (var.dims, value, var.attrs) for name, (var, value) in constants.items()}
    return xr.Dataset(data, coords={"seed": [0], "step": [0]})


@pytest.mark.parametrize("kind", RUNS)
def test_which_probes_apply_to_which_runs(kind):
    """Circuits ask for attention alone, closed forms for more, and several responses for theirs."""
    trajectory, counted = stored(kind), 0
    one_response = set() if kind == "two tasks" else set(PATTERN_PROBES)
    for name in (*PATTERN_PROBES, *set().union(*BESIDES.values())):
        record = analyses.get(name)
        reason = record.objection(trajectory)
        assert (reason is None) == (name in one_response | BESIDES[kind]), (name, reason)
        if reason is None:
            assert record(trajectory).sizes["step"] == 1
        elif kind == "two tasks" and name in PATTERN_PROBES:
            assert "one response" in reason and "d_model is 8" in reason
        counted += 1
    assert counted == 9
