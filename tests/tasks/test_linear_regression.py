"""The task against its definition: moments, embedding, references."""

import numpy as np
import pydantic
import pytest
import torch

from mechicl import tasks
from mechicl.errors import InputError
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.streams import generator
from mechicl.theory import exact_risk, preconditioned
from mechicl.theory import linear_regression as theory

KMS = tuple(tuple(0.5 ** abs(i - j) for j in range(3)) for i in range(3))


def test_found_by_name() -> None:
    assert tasks.get("linear-regression") is LinearRegression
    with pytest.raises(InputError, match="did you mean 'linear_regression'"):
        tasks.get("linear_regresion")


@pytest.mark.parametrize("covariance", [None, KMS], ids=["identity", "kms"])
def test_moments_are_those_of_the_definition(covariance: tuple | None) -> None:
    """E xxᵀ = Σ, E y² = tr Σ/d + σ², E x y = 0, within five standard errors of 200,000 draws."""
    n = 200_000
    task = LinearRegression(d=3, n_context=1, noise_variance=0.5, covariance=covariance)
    sample = task.sample(n, seed=0)
    x, y = sample["inputs"].values[:, 0, :3], sample["inputs"].values[:, 0, 3]
    sigma = np.eye(3) if covariance is None else np.array(covariance)
    for i in range(3):
        for j in range(3):
            product = x[:, i] * x[:, j]
            assert abs(product.mean() - sigma[i, j]) < 5 * product.std() / n**0.5
        assert abs((x[:, i] * y).mean()) < 5 * (x[:, i] * y).std() / n**0.5
    expected = np.trace(sigma) / 3 + 0.5
    assert abs((y**2).mean() - expected) < 5 * (y**2).std() / n**0.5
    wrong = np.trace(sigma) + 0.5  # β ~ N(0, I) instead of N(0, I/d)
    assert abs((y**2).mean() - wrong) > 20 * (y**2).std() / n**0.5


def test_context_and_query_share_one_beta() -> None:
    """Without noise the query's target is what least squares on the context predicts."""
    task = LinearRegression(d=2, n_context=5, noise_variance=0)
    sample = task.sample(100, seed=1)
    inputs = sample["inputs"].values.astype(float)
    for prompt, target in zip(inputs, sample["targets"].values, strict=True):
        beta, *_ = np.linalg.lstsq(prompt[:-1, :2], prompt[:-1, 2])
        assert target == pytest.approx(prompt[-1, :2] @ beta, abs=1e-4)


def test_covariates_of_context_and_query_are_alike() -> None:
    """Σ shapes every position: second moments at each of them, within five standard errors."""
    n = 200_000
    task = LinearRegression(d=3, n_context=1, covariance=KMS)
    x = task.sample(n, seed=0)["inputs"].values[..., :3]
    counted = 0
    for position in range(task.n_positions):
        product = x[:, position, 0] * x[:, position, 1]
        assert abs(product.mean() - 0.5) < 5 * product.std() / n**0.5
        counted += 1
    assert counted == 2


def test_the_target_never_reaches_the_inputs() -> None:
    """Changing the query's noise changes y_q and nothing that the model reads."""
    task = LinearRegression(d=2, n_context=3)
    normals = torch.randn(10, task.n_normals, generator=generator("test", 0))
    changed = normals.clone()
    changed[:, task.d * task.n_positions + task.n_context] += 3.0
    before, after = task.prompts(normals), task.prompts(changed)
    assert torch.equal(before.inputs, after.inputs)
    assert (before.targets != after.targets).all()
    assert (before.inputs[:, -1, -1] == 0).all()


def test_sample_is_a_function_of_its_seed() -> None:
    task = LinearRegression()
    first, again, other = (task.sample(4, seed=seed) for seed in (0, 0, 1))
    assert first.equals(again)
    assert not first.equals(other)
    longer = task.sample(6, seed=0)
    assert dict(longer.sizes) == {"batch": 6, "pos": 41, "d_model": 6}


@pytest.mark.parametrize(
    ("n", "seed", "message"),
    [
        (0, 0, "n of a sample is an integer from 1; given 0"),
        (-1, 0, "n of a sample"),
        (2.5, 0, r"n of a sample is an integer from 1; given 2\.5"),
        (True, 0, "n of a sample"),
        (10**12, 0, "GiB, above the limit"),
        (3, -1, "seed of a sample is an integer from 0; given -1"),
        (3, "0", "seed of a sample"),
    ],
)
def test_bad_samples_are_refused(n: int, seed: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinearRegression().sample(n, seed=seed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d": 0}, "greater than or equal to 1"),
        ({"d": 2.5}, "valid integer"),
        ({"n_context": 0}, "greater than or equal to 1"),
        ({"noise_variance": -0.1}, "greater than or equal to 0"),
        ({"noise_variance": float("nan")}, "finite"),
        ({"noise_var": 0.1}, "Extra inputs"),
        ({"d": 2, "covariance": ((1, 0),)}, "needs 2 rows of 2"),
        ({"d": 2, "covariance": ((1, 0.5), (0.4, 1))}, "not symmetric"),
        ({"d": 2, "covariance": ((1, 2), (2, 1))}, "smallest eigenvalue is -1"),
        ({"d": 2, "covariance": ((1, 1), (1, 1))}, "not positive definite"),
        ({"d": 1, "covariance": ((float("inf"),),)}, "finite"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        LinearRegression(**settings)


def test_identity_covariance_changes_nothing() -> None:
    given = LinearRegression(d=2, covariance=((1, 0), (0, 1)))
    assert given.isotropic
    assert not LinearRegression(d=2, covariance=((2, 0), (0, 1))).isotropic
    np.testing.assert_allclose(
        given.sample(5, seed=0)["inputs"], LinearRegression(d=2).sample(5, seed=0)["inputs"]
    )


def test_references_reach_their_exact_risks() -> None:
    """Vanilla and debiased GD at their exact risks, within five standard errors; ridge below."""
    task = LinearRegression()
    sample = task.sample(20_000, seed=2)
    targets = sample["targets"].values
    at = {"d": task.d, "n_context": task.n_context, "noise_variance": task.noise_variance}
    errors = {
        name: (predicted - targets) ** 2
        for name, predicted in task.references(sample["inputs"].values).items()
    }
    names = {"ridge", "least_squares", "vanilla_gd", "debiased_gd", "single_head"}
    assert set(errors) == names
    exact = {
        "vanilla_gd": exact_risk.vanilla_gd_risk(
            exact_risk.optimal_vanilla_learning_rate(**at), **at
        ),
        "debiased_gd": exact_risk.debiased_gd_risk(theory.optimal_learning_rate(**at), **at),
    }
    for name, risk in exact.items():
        error = errors[name]
        assert abs(error.mean() - risk) < 5 * error.std() / len(error) ** 0.5
    assert errors["ridge"].mean() < errors["debiased_gd"].mean() < errors["single_head"].mean()


def test_references_are_the_estimators_written_out() -> None:
    """Ridge is the posterior mean of β ~ N(0, I/d); GD has the step that is best for it at L."""
    task = LinearRegression(d=3, n_context=7, noise_variance=0.5)
    inputs = task.sample(50, seed=0)["inputs"].values.astype(float)
    x, y, query = inputs[:, :-1, :-1], inputs[:, :-1, -1], inputs[:, -1, :-1]
    precision = np.einsum("nld,nle->nde", x, x) / 0.5 + 3 * np.eye(3)
    beta = np.linalg.solve(precision, np.einsum("nld,nl->nd", x, y)[..., None] / 0.5)[..., 0]
    centred = x - x.mean(1, keepdims=True)
    vanilla_rate, debiased_rate = 1 / (1 + (3 + 1 + 3 * 0.5) / 7), 1 / (1 + 1.5 * 3 / 7)
    expected = {
        "ridge": (beta * query).sum(-1),
        "vanilla_gd": vanilla_rate / 7 * np.einsum("nl,nld,nd->n", y, x, query),
        "debiased_gd": debiased_rate / 7 * np.einsum("nl,nld,nd->n", y, centred, query),
    }
    given = task.references(inputs)
    for name, value in expected.items():
        np.testing.assert_allclose(given[name], value, rtol=1e-10, atol=1e-12, err_msg=name)
    other = LinearRegression(d=3, n_context=7, noise_variance=0.6).references(inputs)
    tuned = given.keys() - {"least_squares"}
    assert all(not np.allclose(other[name], given[name], rtol=1e-3) for name in tuned)


def test_constants_are_those_of_the_task() -> None:
    task = LinearRegression(d=2, n_context=7, noise_variance=0.5, covariance=((2, 0), (0, 1)))
    values = {name: value for name, (_, value) in task.constants().items()}
    np.testing.assert_array_equal(values.pop("covariance"), [[2, 0], [0, 1]])
    assert values == {"d": 2, "n_context": 7, "noise_variance": 0.5, "isotropic": False}


def test_anisotropic_references_meet_their_exact_risks() -> None:
    """At Σ_ij = 0.5^|i−j|: by simulation, in order, and not at the risks of one another."""
    task = LinearRegression(covariance={"rho": 0.5})
    sigma, at = task.sigma, {"n_context": 40, "noise_variance": 0.1}
    n = 20_000
    sample = task.sample(n, seed=0)
    targets = sample["targets"].values.astype(float)
    errors = {
        name: (predicted - targets) ** 2
        for name, predicted in task.references(sample["inputs"].values).items()
    }
    risks = {}
    for debiased, prefix in ((False, ""), (True, "debiased_")):
        rate = preconditioned.optimal_scalar_learning_rate(sigma, debiased=debiased, **at)
        matrix = preconditioned.optimal_preconditioner(sigma, debiased=debiased, **at)
        for name, omega in (
            (prefix + "gd" if debiased else "vanilla_gd", rate * np.eye(5)),
            (prefix + "preconditioned_gd", matrix),
        ):
            risk = preconditioned.preconditioned_gd_risk(omega, sigma, debiased=debiased, **at)
            risks[name] = float(risk)
    assert set(errors) == {"ridge", "least_squares", *risks}
    for name, risk in risks.items():
        assert abs(errors[name].mean() - risk) < 5 * errors[name].std() / n**0.5, name
        gap = errors[name] - errors["ridge"]
        assert gap.mean() > 5 * gap.std() / n**0.5, name
    for debiased in ("", "debiased_"):
        scalar = errors[(debiased or "vanilla_") + "gd"]
        gain = scalar - errors[f"{debiased}preconditioned_gd"]
        assert gain.mean() > 5 * gain.std() / n**0.5
    short = task.at_length(8).sample(2000, seed=0)  # at L = 40 the two are nearly equal
    least = task.references(short["inputs"].values)
    over = (least["least_squares"] - short["targets"].values) ** 2
    over -= (least["ridge"] - short["targets"].values) ** 2
    assert over.mean() > 5 * over.std() / 2000**0.5


def test_references_are_tuned_at_the_tasks_own_length() -> None:
    """Fitted predictors stay those of the trained length; ridge has none."""
    counted = 0
    for covariance in (None, {"rho": 0.5}):
        task = LinearRegression(covariance=covariance)
        inputs = task.at_length(10).sample(20, seed=0)["inputs"].values
        trained, refitted = task.references(inputs), task.at_length(10).references(inputs)
        assert trained.keys() == refitted.keys()
        for name, predicted in trained.items():
            same = np.allclose(predicted, refitted[name], rtol=1e-3)
            assert same == (name in ("ridge", "least_squares")), name
            counted += 1
    assert counted == 5 + 6


def test_preconditioned_steps_are_those_written_out() -> None:
    """(5.6) for the plain step; without its 1/L for the debiased one, which at L = 4 tells."""
    task = LinearRegression(d=3, n_context=4, noise_variance=0.5, covariance=KMS)
    inputs = task.sample(20, seed=0)["inputs"].values.astype(float)
    x, y, query = inputs[:, :-1, :-1], inputs[:, :-1, -1], inputs[:, -1, :-1]
    sigma, spread = np.array(KMS), (3 + 3 * 0.5) / 4 * np.eye(3)
    given, solved = task.references(inputs), []
    for name, own, taken in (
        ("preconditioned_gd", 1 + 1 / 4, x),
        ("debiased_preconditioned_gd", 1.0, x - x.mean(1, keepdims=True)),
    ):
        step = np.einsum("nl,nld->nd", y, taken) / 4
        predicted = np.einsum("nd,nd->n", step @ np.linalg.inv(own * sigma + spread), query)
        np.testing.assert_allclose(given[name], predicted, rtol=1e-10, atol=1e-12)
        solved.append(predicted)
    assert np.abs(solved[0] - solved[1]).max() > 0.05
