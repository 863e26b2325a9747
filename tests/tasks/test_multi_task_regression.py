"""Several responses of one covariate: moments, embedding, references."""

from itertools import pairwise

import numpy as np
import pydantic
import pytest
import torch

from mechicl import tasks
from mechicl.errors import InputError
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.multi_task_regression import MultiTaskRegression
from mechicl.tasks.streams import generator
from mechicl.theory import preconditioned

KMS = {"rho": 0.5}
SMALL = MultiTaskRegression(d=4, n_context=7, noise_variance=0.5, supports=((2, 0, 1), (3, 2)))


def within(values: np.ndarray, expected: float, errors: float = 5) -> bool:
    return abs(values.mean() - expected) < errors * values.std() / len(values) ** 0.5


def normals(task: MultiTaskRegression | LinearRegression, n: int = 10) -> torch.Tensor:
    return torch.randn(n, task.n_normals, generator=generator("test", 0))


def parts(task: MultiTaskRegression, n: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return covariates, responses, query and target, in float64."""
    sample = task.sample(n, seed=seed)
    inputs = sample["inputs"].values.astype(float)
    return (
        inputs[:, :-1, : task.d],
        inputs[:, :-1, task.d :],
        inputs[:, -1, : task.d],
        (sample["targets"].values.astype(float)),
    )


def test_found_by_name() -> None:
    assert tasks.get("multi-task-regression") is MultiTaskRegression


@pytest.mark.parametrize("covariance", [None, KMS, "other"], ids=["identity", "kms", "other"])
def test_moments_are_those_of_the_definition(covariance: object) -> None:
    """E y_n y_m = Σ_{i ∈ 𝒮_n ∩ 𝒮_m} Σ_ii/d, and σ² more for n = m: noise is of each task alone."""
    n = 200_000
    scales = np.array([1.0, 2.0, 3.0, 0.5])
    rows = np.diag(scales).tolist() if covariance == "other" else covariance
    diagonal = scales if covariance == "other" else np.ones(4)
    task = SMALL.model_copy(update={"n_context": 1}).model_dump() | {"covariance": rows}
    x, y, query, target = parts(MultiTaskRegression(**task), n)
    first, second = y[:, 0, 0], y[:, 0, 1]
    assert within(first**2, diagonal[:3].sum() / 4 + 0.5)
    assert within(second**2, diagonal[2:].sum() / 4 + 0.5)
    assert within(target[:, 0] ** 2, diagonal[:3].sum() / 4 + 0.5)
    assert within(target[:, 1] ** 2, diagonal[2:].sum() / 4 + 0.5)
    assert within(first * second, diagonal[2] / 4)
    assert not within(first * second, diagonal[2] / 4 + 0.5, 20), "one noise for both"
    assert not within(first * second, diagonal[2], 20), "β ~ N(0, I)"
    assert within(x[:, 0, 1] * query[:, 1], 0)


def test_one_beta_for_tasks_and_positions() -> None:
    """E y_1(x) x_i · y_2(x′) x′_j = δ_ij/d where both tasks read i, else 0, at Σ = I."""
    n, counted = 400_000, 0
    x, y, query, target = parts(SMALL.at_length(1), n)
    for i in range(4):
        for j in range(4):
            moment = y[:, 0, 0] * x[:, 0, i] * target[:, 1] * query[:, j]
            assert within(moment, 0.25 if i == j == 2 else 0.0), (i, j)
            counted += 1
    assert counted == 16


def test_without_noise_all_responses_are_of_one_beta() -> None:
    task = MultiTaskRegression(d=3, n_context=4, noise_variance=0, supports=((0, 2), (1, 2)))
    x, y, query, target = parts(task, 50)
    for prompt in range(50):
        rows = np.concatenate([x[prompt] * member for member in task.membership])
        beta, *_ = np.linalg.lstsq(rows, y[prompt].T.ravel())
        expected = [beta[[0, 2]] @ query[prompt, [0, 2]], beta[[1, 2]] @ query[prompt, [1, 2]]]
        np.testing.assert_allclose(target[prompt], expected, atol=1e-4)
        np.testing.assert_allclose(rows @ beta, y[prompt].T.ravel(), atol=1e-4)


def test_one_task_of_all_covariates_is_linear_regression() -> None:
    """The same prompts for the same normals, whatever the covariance; not so for other supports."""
    counted = 0
    for covariance in (None, KMS):
        settings = {"d": 3, "n_context": 5, "covariance": covariance}
        one = MultiTaskRegression(supports=((0, 1, 2),), **settings)
        plain = LinearRegression(**settings)
        assert (one.d_model, one.n_normals) == (plain.d_model, plain.n_normals)
        given, expected = one.prompts(normals(one)), plain.prompts(normals(plain))
        assert torch.equal(given.inputs, expected.inputs)
        assert torch.equal(given.targets[:, 0], expected.targets)
        fewer = MultiTaskRegression(supports=((0, 1),), **settings).prompts(normals(one))
        assert not torch.allclose(fewer.targets[:, 0], expected.targets)
        shared, alone = one.references(given.inputs.numpy()), plain.references(given.inputs.numpy())
        for name in shared.keys() & alone.keys():
            np.testing.assert_allclose(shared[name][:, 0], alone[name], rtol=1e-10, atol=1e-12)
            counted += 1
    assert counted == 2 + 3  # ridge and debiased_gd, and single_head at Σ = I


def test_targets_never_reach_the_inputs() -> None:
    """Changing the query's noise of one task changes its target and nothing else."""
    before, counted = SMALL.prompts(normals(SMALL)), 0
    for task, other in ((0, 1), (1, 0)):
        changed = normals(SMALL)
        noise = SMALL.d * SMALL.n_positions + task * SMALL.n_positions  # of the first position
        changed[:, noise + SMALL.n_context] += 3.0
        after = SMALL.prompts(changed)
        assert torch.equal(before.inputs, after.inputs)
        assert torch.equal(before.targets[:, other], after.targets[:, other])
        torch.testing.assert_close(after.targets[:, task], before.targets[:, task] + 3 * 0.5**0.5)
        counted += 1
    assert counted == 2
    assert (before.inputs[:, -1, 4:] == 0).all()
    assert (before.inputs[:, :-1, 4:] != 0).all()


def test_leading_axes_are_those_of_the_normals() -> None:
    numbers = normals(SMALL, 12)
    whole = SMALL.prompts(numbers)
    stacked = SMALL.prompts(numbers.reshape(3, 4, -1))
    assert stacked.inputs.shape == (3, 4, 8, 6)
    torch.testing.assert_close(stacked.inputs.flatten(0, 1), whole.inputs)
    torch.testing.assert_close(stacked.targets.flatten(0, 1), whole.targets)


def conditioned(task: MultiTaskRegression, n: int, *, joint: bool) -> np.ndarray:
    """Return E[y_q | responses] by conditioning one Gaussian vector, β integrated out."""
    x, y, query, _ = parts(task, n)
    shared = task.membership[:, None, :] * task.membership[None, :, :] / task.d
    out = np.empty((n, task.n_responses))
    for prompt in range(n):
        # Covariance of (task, example) with (task, example).
        cov = np.einsum("li,nmi,ki->nlmk", x[prompt], shared, x[prompt])
        to_query = np.einsum("i,nmi,ki->nmk", query[prompt], shared, x[prompt])
        for number in range(task.n_responses):
            seen = list(range(task.n_responses)) if joint else [number]
            size = len(seen) * task.n_context
            among = cov[np.ix_(seen, range(task.n_context), seen, range(task.n_context))]
            system = among.reshape(size, size) + task.noise_variance * np.eye(size)
            observed = y[prompt].T[seen].ravel()
            out[prompt, number] = to_query[number][seen].ravel() @ np.linalg.solve(system, observed)
    return out


@pytest.mark.parametrize("covariance", [None, KMS], ids=["identity", "kms"])
def test_ridge_is_the_posterior_mean(covariance: object) -> None:
    settings = SMALL.model_dump() | {"covariance": covariance}
    task = MultiTaskRegression(**settings)
    inputs = task.sample(20, seed=0)["inputs"].values
    given = task.references(inputs)
    joint, alone = (conditioned(task, 20, joint=joint) for joint in (True, False))
    np.testing.assert_allclose(given["ridge"], joint, rtol=0, atol=1e-10)
    np.testing.assert_allclose(given["single_task_ridge"], alone, rtol=0, atol=1e-10)
    assert np.abs(joint - alone).max() > 0.05


def test_tasks_that_share_nothing_tell_nothing_of_each_other() -> None:
    task = MultiTaskRegression(d=4, n_context=5, supports=((0, 3), (2,)))
    given = task.references(task.sample(20, seed=0)["inputs"].values)
    np.testing.assert_allclose(given["ridge"], given["single_task_ridge"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("covariance", [None, KMS], ids=["identity", "kms"])
def test_debiased_gd_is_at_its_best_rate_and_risk(covariance: object) -> None:
    """The best multiple of its predictions is 1; its loss is what theory says of its covariates."""
    task = MultiTaskRegression(**(SMALL.model_dump() | {"covariance": covariance}))
    n = 20_000
    sample = task.sample(n, seed=0)
    targets = sample["targets"].values.astype(float)
    given = task.references(sample["inputs"].values)["debiased_gd"]
    for number, support in enumerate(task.supports):
        size, predicted, target = len(support), given[:, number], targets[:, number]
        slope = predicted * (target - predicted)  # of the loss in the rate: 0 at the best
        assert within(slope, 0)
        assert not within(1.2 * predicted * (target - 1.2 * predicted), 0)
        sigma = task.sigma[np.ix_(support, support)]
        at = {"n_context": 7, "noise_variance": 0.5 * 4 / size, "debiased": True}
        rate = preconditioned.optimal_scalar_learning_rate(sigma, **at)
        risk = preconditioned.preconditioned_gd_risk(rate * np.eye(size), sigma, **at)
        assert within((predicted - target) ** 2, float(risk) * size / 4)


def test_single_head_is_the_formula_on_its_own_covariates() -> None:
    """(ω*, μ*) = (1/√s, √s/(1 + e(1+σ²d/s)s/L)), the signal of a task being s/d of a whole one."""
    x, y, query, _ = parts(SMALL, 20)
    given = SMALL.references(SMALL.sample(20, seed=0)["inputs"].values)["single_head"]
    for number, support in enumerate(SMALL.supports):
        s = len(support)
        omega = s**-0.5
        mu = s**0.5 / (1 + np.e * (1 + 0.5 * 4 / s) * s / 7)
        columns = sorted(support)
        weights = np.exp(omega * np.einsum("nld,nd->nl", x[..., columns], query[..., columns]))
        expected = mu * (weights * y[..., number]).sum(1) / weights.sum(1)
        np.testing.assert_allclose(given[:, number], expected, rtol=1e-10)


def test_ridge_beats_the_others_by_what_the_tasks_share() -> None:
    task = MultiTaskRegression(n_context=6)
    sample = task.sample(20_000, seed=0)
    losses = {
        name: ((predicted - sample["targets"].values) ** 2).mean(-1)
        for name, predicted in task.references(sample["inputs"].values).items()
    }
    assert list(losses) == ["ridge", "single_task_ridge", "debiased_gd", "single_head"]
    names, counted = list(losses), 0
    for better, worse in pairwise(names):
        gap = losses[worse] - losses[better]
        assert gap.mean() > 5 * gap.std() / len(gap) ** 0.5, (better, worse)
        counted += 1
    assert counted == 3
    wide = MultiTaskRegression(n_context=6, covariance=KMS)
    assert list(wide.references(wide.sample(2, seed=0)["inputs"].values)) == names[:3]


def test_references_are_tuned_at_the_tasks_own_length() -> None:
    longer = SMALL.at_length(30).sample(20, seed=0)["inputs"].values
    tuned_at_7, tuned_at_30 = SMALL.references(longer), SMALL.at_length(30).references(longer)
    for name in ("ridge", "single_task_ridge"):
        np.testing.assert_array_equal(tuned_at_7[name], tuned_at_30[name])
    for name in ("debiased_gd", "single_head"):
        assert np.abs(tuned_at_7[name] - tuned_at_30[name]).max() > 0.05


def test_loss_is_the_mean_over_tasks() -> None:
    predictions, targets = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 5.0]] * 2)
    assert SMALL.loss(predictions, targets).tolist() == [5.0, 12.5]


def test_constants_are_those_of_the_task() -> None:
    declared = SMALL.constants()
    assert set(declared) == {"d", "n_context", "noise_variance", "covariance", "supports"}
    variable, members = declared["supports"]
    assert variable.dims == ("response", "covariate")
    np.testing.assert_array_equal(members, [[1, 1, 1, 0], [0, 0, 1, 1]])
    assert SMALL.target_sizes == {"response": 2}
    assert SMALL.d_model == 6


def test_samples_have_an_axis_of_responses() -> None:
    sample = SMALL.sample(3, seed=0)
    assert sample["targets"].dims == ("batch", "response")
    assert dict(sample.sizes) == {"batch": 3, "pos": 8, "d_model": 6, "response": 2}


def test_the_smallest_task_runs() -> None:
    task = MultiTaskRegression(d=1, n_context=1, supports=((0,),))
    sample = task.sample(5, seed=0)
    assert sample["inputs"].shape == (5, 2, 2)
    for name, predicted in task.references(sample["inputs"].values).items():
        assert predicted.shape == (5, 1), name
        assert np.isfinite(predicted).all(), name


def test_at_length_changes_the_length_alone() -> None:
    longer = SMALL.at_length(9)
    assert SMALL.n_context == 7
    assert longer == MultiTaskRegression(**(SMALL.model_dump() | {"n_context": 9}))
    assert longer.sample(2, seed=0)["inputs"].shape == (2, 10, 6)
    with pytest.raises(InputError, match="n_context is an integer from 1; given 0"):
        SMALL.at_length(0)


@pytest.mark.parametrize(
    ("supports", "message"),
    [
        ((), "one task at least"),
        (((0,), ()), r"supports\[1\] is empty; a task reads one covariate at least"),
        (((0, 4),), r"supports\[0\] = \(0, 4\) has indices outside 0 \.\. 3 \(d = 4\)"),
        (((1,), (-1, 0)), r"supports\[1\] = \(-1, 0\) has indices outside"),
        (((0, 1, 0),), r"supports\[0\] = \(0, 1, 0\) repeats an index"),
        (((0.5,),), "valid integer"),
        (((True,),), "must not be a boolean"),
        ((0, 1), "valid tuple"),
    ],
)
def test_bad_supports_are_refused(supports: object, message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        MultiTaskRegression(d=4, supports=supports)
