import json

import numpy as np
import pytest
import torch

from mechicl import analyses
from mechicl.analyses.heads import kq_circuit, ov_circuit
from mechicl.models.base import get as get_model
from mechicl.tasks import get as get_task
from tests import trajectories
from tests.analyses.toy import one_task

OVERLAP = ((0, 1, 2, 3), (2, 3, 4, 5))
DISJOINT = ((0, 1, 2), (3, 4, 5))
GAMMA, MU = 0.15, 3.0
NOT_SERVED, ONE_HEAD, ONE_TASK, SUPERPOSED = 0, 1, 2, 3


def multi_task(heads, supports=OVERLAP, d: int = 6, **settings):
    """Return a trajectory of heads, each (KQ's diagonal over d, μ of each task)."""
    n = len(supports)
    kq, ov = np.random.default_rng(3).normal(size=(2, 1, 1, len(heads), d + n, d + n))
    kq[..., :, :d] = 0.0  # the columns of responses are free: the query has none
    ov[..., d:, :] = 0.0
    for h, (diagonal, mu) in enumerate(heads):
        kq[0, 0, h, range(d), range(d)] = diagonal
        ov[0, 0, h, range(d, d + n), range(d, d + n)] = mu
        if not np.any(diagonal) and not np.any(mu):
            kq[0, 0, h], ov[0, 0, h] = 0.0, 0.0
    member = np.array([[float(i in support) for i in range(d)] for support in supports])
    trajectory = trajectories.from_circuits(kq, ov, d=d, **settings)
    return trajectory.assign(supports=(("response", "covariate"), member, {"units": "1"}))


def reads(*indices: int, size: float = GAMMA) -> np.ndarray:
    out = np.zeros(6)
    out[list(indices)] = size
    return out


def measure(heads, supports=OVERLAP, *, serve_threshold: float = 0.2, **settings):
    record = analyses.get("task_allocation")
    return record(multi_task(heads, supports, **settings), serve_threshold=serve_threshold)


PAIRS = [
    (reads(0, 1, 2, 3), (MU, 0)),
    (-reads(0, 1, 2, 3), (-MU, 0)),
    (reads(2, 3, 4, 5), (0, MU)),
    (-reads(2, 3, 4, 5), (0, -MU)),
]
SHARED = [
    (reads(0, 1, 2, 3), (MU, 0)),
    (reads(2, 3, 4, 5), (0, MU)),
    (-reads(0, 1, 2, 3, 4, 5), (-MU, -MU)),
]
SINGLE = [(reads(0, 1, 2), (1.6, 0)), (reads(3, 4, 5), (0, 1.6))]
DUMMY = (reads(0, 1, size=0.01), (0.1, -0.1))


def serving(result) -> list[list[int]]:
    return result["serves"].values[0, 0].astype(int).tolist()


def test_pairs_of_one_task_each_though_the_index_sets_overlap():
    result = measure(PAIRS)
    assert serving(result) == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert result["regime"].values == ONE_TASK and result["holds"].values == 1
    np.testing.assert_allclose(result["omega"].values[0, 0, 0], [GAMMA, GAMMA / 2], rtol=1e-12)
    np.testing.assert_allclose(result["mu"].values[0, 0, 1], [-MU, 0], atol=1e-12)
    np.testing.assert_allclose(result["share"].values[0, 0, :, 0], [0.5, 0.5, 0, 0], atol=1e-12)
    np.testing.assert_array_equal(result["n_tasks"].values[0, 0], [1, 1, 1, 1])
    np.testing.assert_array_equal(result["n_positive"].values[0, 0], [1, 1])
    np.testing.assert_array_equal(result["n_negative"].values[0, 0], [1, 1])
    assert result["superposition"].values == 0
    np.testing.assert_allclose(result["off_support"].values, 0, atol=1e-12)
    np.testing.assert_allclose(result["kq_diagonal"].values[0, 0, 2], reads(2, 3, 4, 5), atol=1e-12)


def test_three_heads_share_two_tasks_in_superposition():
    result = measure([*SHARED, DUMMY])
    assert serving(result) == [[1, 0], [0, 1], [1, 1], [0, 0]]
    assert result["regime"].values == SUPERPOSED and result["holds"].values == 1
    np.testing.assert_allclose(result["superposition"].values, 1 / 3, rtol=1e-12)
    np.testing.assert_array_equal(result["n_tasks"].values[0, 0], [1, 1, 2, 0])
    np.testing.assert_array_equal(result["n_positive"].values[0, 0], [1, 1])
    np.testing.assert_array_equal(result["n_negative"].values[0, 0], [1, 1])
    assert np.isnan(result["off_support"].values[0, 0, 3])
    assert json.loads(result.attrs["n_undefined"])["head_without_task"] == 1


def test_one_head_per_task_where_sets_are_disjoint():
    result = measure(SINGLE, DISJOINT)
    assert serving(result) == [[1, 0], [0, 1]]
    assert result["regime"].values == ONE_HEAD
    np.testing.assert_array_equal(result["n_negative"].values[0, 0], [0, 0])
    assert result["undefined"].values == 0
    doubled = measure([*SINGLE, SINGLE[0]], DISJOINT)
    assert doubled["regime"].values == ONE_TASK
    np.testing.assert_array_equal(doubled["n_positive"].values[0, 0], [2, 1])


def test_a_task_that_nobody_serves():
    result = measure([PAIRS[0], PAIRS[1], (reads(2, 3, 4, 5), (0, -MU))])
    assert serving(result) == [[1, 0], [1, 0], [0, 0]]  # the last one descends backwards
    assert result["regime"].values == NOT_SERVED and result["holds"].values == 0
    np.testing.assert_allclose(result["share"].values[0, 0, :, 1], [0, 0, 1], atol=1e-12)


def test_a_head_may_be_positive_for_one_task_and_negative_for_another():
    diagonal = reads(0, 1, 2) - reads(3, 4, 5)
    result = measure([(diagonal, (MU, -MU)), (-diagonal, (-MU, MU))], DISJOINT)
    assert serving(result) == [[1, 1], [1, 1]]
    assert result["superposition"].values == 1 and result["regime"].values == SUPERPOSED
    np.testing.assert_array_equal(result["n_positive"].values[0, 0], [1, 1])
    np.testing.assert_array_equal(result["n_negative"].values[0, 0], [1, 1])
    np.testing.assert_allclose(result["omega"].values[0, 0], GAMMA * np.array([[1, -1], [-1, 1]]))


def test_of_an_overlap_mu_decides():
    """The other task's ω is half of its own for both heads here; what is written differs."""
    quiet = measure([*PAIRS, (reads(0, 1, 2, 3), (MU, 0.3))])
    loud = measure([*PAIRS, (reads(0, 1, 2, 3), (MU, 1.5))])
    assert serving(quiet)[4] == [1, 0] and serving(loud)[4] == [1, 1]
    strength = loud["strength"].values[0, 0, 4]
    np.testing.assert_allclose(strength, [GAMMA * MU, GAMMA / 2 * 1.5], rtol=1e-12)
    silent = measure([*SINGLE, (reads(0, 1, 2), (1.0, 1.0))], DISJOINT)
    assert serving(silent)[2] == [1, 0]  # writes to a task of which it reads nothing


def test_the_threshold_is_a_part_of_the_strongest_head():
    heads = [(reads(0, 1, 2), (2.0, 0)), (reads(0, 1, 2), (0.5, 0)), SINGLE[1]]
    for threshold, serves in ((0.24, 1), (0.26, 0)):
        result = measure(heads, DISJOINT, serve_threshold=threshold)
        assert result["serves"].values[0, 0, 1, 0] == serves
    weak = [SINGLE[0], (reads(3, 4, 5), (0, 0.01))]  # the strongest in a task, however weak
    assert serving(measure(weak, DISJOINT)) == [[1, 0], [0, 1]]
    for factor in (1e-3, 1e3):
        scaled = [(factor * diagonal, np.array(mu)) for diagonal, mu in SHARED]
        assert serving(measure(scaled)) == serving(measure(SHARED))


def test_what_lies_outside_the_served_index_sets():
    """Head 0 serves task 1 alone, and reads a covariate of task 2 alone at a third of GAMMA."""
    result = measure([(reads(0, 1, 2, 3) - reads(4, size=GAMMA / 3), (MU, 0)), *PAIRS[1:]])
    np.testing.assert_allclose(
        result["off_support"].values[0, 0], [(1 / 3) / (4 + 1 / 3), 0, 0, 0], atol=1e-12
    )
    both = measure([(reads(0, 1, 2, 3, 4, 5), (MU, MU))])
    np.testing.assert_allclose(both["off_support"].values, 0, atol=1e-12)


@pytest.mark.parametrize(
    ("heads", "regime"),
    [([(GAMMA, MU)], ONE_HEAD), ([(GAMMA, MU), (-GAMMA, -MU)], ONE_TASK)],
)
def test_one_task(heads, regime):
    """N = 1: a head or a pair, never in superposition."""
    omega, mu = zip(*heads, strict=True)
    result = analyses.get("task_allocation")(one_task(trajectories.from_scales(omega, mu)))
    assert result["regime"].values == regime and result["superposition"].values == 0
    np.testing.assert_allclose(result["omega"].values[0, 0, :, 0], omega, rtol=1e-12)
    assert result.sizes["response"] == 1


def test_a_model_of_zeros_serves_nobody():
    result = measure([(reads(), (0, 0))] * 2)
    assert result["holds"].values == 0 and result["regime"].values == NOT_SERVED
    for name in ("share", "superposition", "off_support"):
        assert np.isnan(result[name].values).all()
    assert json.loads(result.attrs["n_undefined"])["task_without_strength"] == 1


def test_order_of_tasks_follows_the_index_sets():
    swapped = [(diagonal, mu[::-1]) for diagonal, mu in SHARED]
    one, other = measure(SHARED), measure(swapped, OVERLAP[::-1])
    for name in ("serves", "omega", "mu", "share", "n_positive"):
        np.testing.assert_allclose(
            one[name].values, other[name].values[..., ::-1], rtol=1e-12, atol=1e-12
        )


def test_cross_entries_between_responses_are_not_read():
    trajectory = multi_task(PAIRS)
    kq = kq_circuit(trajectory).values[:, :, 0]
    ov = ov_circuit(trajectory).values[:, :, 0]
    ov[..., 6, 7], ov[..., 7, 0], kq[..., 0, 5] = 9.0, -9.0, 9.0
    other = trajectories.from_circuits(kq, ov, d=6).assign(supports=trajectory["supports"])
    result = analyses.get("task_allocation")(other)
    assert serving(result) == serving(measure(PAIRS))


def test_runs_of_other_tasks_are_refused_with_the_reason():
    record = analyses.get("task_allocation")
    assert record.objection(trajectories.from_scales(0.1, 1.0)) == "the run has no supports"
    assert record.objection(multi_task(PAIRS)) is None
    assert "d_model" in record.objection(multi_task(PAIRS).isel(response=[0]))


@pytest.mark.parametrize("supports", [OVERLAP, ((0, 2), (1,), (2, 3, 4))])
def test_the_step_of_a_task_is_the_sum_of_its_products(supports):
    """At small scores, where the response is one covariate of 𝒮_n, which is queried.

    The model itself predicts, on examples with mean 0 and covariance I: averaged over 𝒮_n it gives
    back Σ_h μ_n · mean of KQ's diagonal over 𝒮_n.
    """
    d, n = 6, len(supports)
    rng = np.random.default_rng(8)
    heads = [(1e-4 * rng.normal(size=d), rng.normal(size=n)) for _ in range(3)]
    trajectory = multi_task(heads, supports)
    result = analyses.get("task_allocation")(trajectory)
    task = get_task("multi_task_regression")(d=d, supports=supports, n_context=2 * d)
    x = np.concatenate([np.eye(d), -np.eye(d)]) * d**0.5  # mean 0, covariance the identity
    weights = {
        w: torch.tensor(trajectory[w].values[0, 0].astype(float)) for w in trajectories.WEIGHTS
    }
    model = get_model("softmax_attention")(n_heads=3)
    for number, support in enumerate(supports):
        inputs = np.zeros((len(support), 2 * d + 1, d + n))
        inputs[:, :-1, :d] = x
        for row, index in enumerate(support):
            inputs[row, :-1, d + number] = x[:, index]
            inputs[row, -1, index] = 1.0
        predicted = model.predict(task, weights, torch.tensor(inputs)).numpy()[:, number].mean()
        step = (result["omega"] * result["mu"]).sum("head").values[0, 0, number]
        np.testing.assert_allclose(predicted, step, rtol=1e-3)
