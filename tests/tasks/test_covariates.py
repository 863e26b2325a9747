"""Covariances: what is accepted, what the covariates then are, and other lengths."""

import numpy as np
import pydantic
import pytest
import torch

from mechicl.errors import InputError
from mechicl.tasks.covariates import KacMurdockSzego
from mechicl.tasks.factors import cholesky_rows
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.streams import generator

KMS = tuple(tuple(0.5 ** abs(i - j) for j in range(4)) for i in range(4))
OTHER = ((2.0, 0.3), (0.3, 0.5))


@pytest.mark.parametrize("rho", [0.5, -0.8, 0.0])
def test_kac_murdock_szego_by_its_parameter(rho: float) -> None:
    task = LinearRegression(d=4, covariance={"rho": rho})
    expected = [[rho ** abs(i - j) for j in range(4)] for i in range(4)]
    np.testing.assert_allclose(task.sigma, expected, rtol=1e-14)
    assert task.isotropic == (rho == 0)
    assert task.covariance == KacMurdockSzego(rho=rho)
    assert LinearRegression.model_validate_json(task.model_dump_json()) == task


def test_rows_and_parameter_give_the_same_prompts() -> None:
    rows, rho = (
        LinearRegression(d=4, covariance=KMS),
        LinearRegression(d=4, covariance={"rho": 0.5}),
    )
    assert rows.sample(5, seed=0).drop_attrs().equals(rho.sample(5, seed=0).drop_attrs())
    assert not rows.sample(5, seed=0).equals(LinearRegression(d=4).sample(5, seed=0))


def test_identity_given_whole_is_the_identity() -> None:
    given, plain = LinearRegression(d=2, covariance=((1, 0), (0, 1))), LinearRegression(d=2)
    assert given.isotropic
    np.testing.assert_array_equal(given.sigma, plain.sigma)
    np.testing.assert_allclose(given.sample(5, seed=0)["inputs"], plain.sample(5, seed=0)["inputs"])


@pytest.mark.parametrize("covariance", [OTHER, {"rho": -0.8}], ids=["rows", "rho"])
def test_covariates_have_the_covariance(covariance: object) -> None:
    n = 200_000
    task = LinearRegression(d=2, n_context=1, covariance=covariance)
    x = task.sample(n, seed=0)["inputs"].values[..., :2].astype(float)
    for position in range(2):
        for i in range(2):
            for j in range(2):
                product = x[:, position, i] * x[:, position, j]
                error = product.std() / n**0.5
                assert abs(product.mean() - task.sigma[i, j]) < 5 * error
    between = x[:, 0, 0] * x[:, 1, 0]
    assert abs(between.mean()) < 5 * between.std() / n**0.5


def test_covariates_are_a_factor_times_normals() -> None:
    """To rounding, in float64, over leading axes, and for one task after another."""
    counted = 0
    for covariance in (OTHER, {"rho": 0.9}, OTHER):
        task = LinearRegression(d=2, covariance=covariance)
        factor = np.array(cholesky_rows(task))
        np.testing.assert_allclose(factor @ factor.T, task.sigma, rtol=1e-14)
        assert factor[0, 1] == 0
        z = torch.randn(3, 2, 4, 5, dtype=torch.float64, generator=generator("test", 0))
        expected = np.einsum("ij,sjpb->sipb", factor, z.numpy())
        np.testing.assert_allclose(task.correlated(z), expected, rtol=1e-12)
        counted += 1
    assert counted == 3


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        ({"rho": 1}, "less than 1"),
        ({"rho": -1.0}, "greater than -1"),
        ({"rho": 1 - 2**-53}, "is 1 or -1 up to rounding"),
        ({"rho": float("nan")}, "finite"),
        ({"rho": True}, "must not be a boolean"),
        ({}, "Field required"),
        ({"rho": 0.5, "d": 2}, "Extra inputs"),
        (0.5, r"must be d rows of d numbers, \{rho: a number\}, or null"),
        ("kms", "must be d rows of d numbers"),
        (((1, 0),), "needs 2 rows of 2; its rows have"),
        (((1, 0, 0), (0, 1)), r"needs 2 rows of 2; its rows have \[3, 2\]"),
        (((1, "a"), (0, 1)), "valid number"),
        (((1, True), (True, 2)), "must not be a boolean"),
        (((1, 0.5), (0.4, 1)), "not symmetric"),
        (((1, 0), (0, float("nan"))), "finite"),
        (((1, 2), (2, 1)), "smallest eigenvalue is -1"),
        (((1, 1), (1, 1)), "not positive definite"),
        (((0.1, 0.3), (0.3, 0.9)), "not positive definite"),  # of rank 1; rounding says 1e-17
        (((1, 0), (0, 1e-20)), "not positive definite"),
    ],
)
def test_bad_covariances_are_refused(covariance: object, message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message) as error:
        LinearRegression(d=2, covariance=covariance)
    assert error.value.error_count() == 1


def test_every_accepted_covariance_has_a_factor() -> None:
    counted = 0
    for rho in (1 - 1e-14, -1 + 1e-14, 0.999, 1e-300):
        task = LinearRegression(d=5, covariance={"rho": rho})
        assert np.isfinite(task.sample(3, seed=0)["inputs"].values).all()
        counted += 1
    assert counted == 4
    skewed = LinearRegression(d=2, covariance=((1, 0), (0, 1e-12)))
    assert skewed.sample(3, seed=0)["inputs"].values[..., 1].std() < 1e-5


def test_a_matrix_beyond_memory_is_refused() -> None:
    with pytest.raises(InputError, match=r"d = 1000000; accepted: up to 11585"):
        _ = LinearRegression(d=1_000_000).sigma


@pytest.mark.parametrize("given", [0, -3, 2.5, True, "7"])
def test_other_lengths_are_whole_numbers(given: object) -> None:
    with pytest.raises(InputError, match="n_context is an integer from 1; given"):
        LinearRegression().at_length(given)


def test_another_length_is_the_same_task_besides() -> None:
    task = LinearRegression(d=2, n_context=3, noise_variance=0.5, covariance=OTHER)
    longer = task.at_length(50)
    settings = task.model_dump() | {"n_context": 50}
    assert longer == LinearRegression(**settings)
    assert (task.n_context, longer.n_positions) == (3, 51)
    assert task.at_length(3) == task
