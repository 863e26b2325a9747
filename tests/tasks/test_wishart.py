"""Chi variables from normals, against SciPy's quantiles."""

import numpy as np
import pytest
import torch
from scipy import stats

from mechicl.tasks.wishart import chi


def exact(normals: np.ndarray, freedom: int) -> np.ndarray:
    """Invert the distribution function from the nearer tail."""
    low = stats.chi.ppf(stats.norm.cdf(normals), freedom)
    return np.where(normals < 0, low, stats.chi.isf(stats.norm.sf(normals), freedom))


@pytest.mark.parametrize("freedom", [1, 2, 7, 449, 65_536])
def test_quantiles_are_those_of_scipy(freedom: int) -> None:
    normals = torch.linspace(-7, 7, 5001, dtype=torch.float64)
    found = chi(normals[None], (freedom,))[0].numpy()
    np.testing.assert_allclose(found, exact(normals.numpy(), freedom), rtol=0, atol=2e-9)
    assert abs(found - exact(normals.numpy(), freedom + 1)).max() > 1e-3
    assert (np.diff(found) > 0).all()


def test_each_row_has_its_own_freedom_whatever_is_before_it() -> None:
    normals = torch.randn(2, 3, 4, 50, generator=torch.Generator().manual_seed(0)).double()
    found = chi(normals, (9, 8, 2, 1))
    assert found.shape == normals.shape
    for row, freedom in enumerate((9, 8, 2, 1)):
        np.testing.assert_allclose(
            found[:, :, row], exact(normals[:, :, row].numpy(), freedom), rtol=0, atol=2e-9
        )


def test_single_precision_is_enough() -> None:
    normals = torch.linspace(-6, 6, 2001)
    found = chi(normals[None], (512,))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found[0], exact(normals.double().numpy(), 512), rtol=1e-6)


def test_ends_of_the_table_are_met() -> None:
    found = chi(torch.tensor([[-50.0, -9.0, 9.0, 50.0]]).double(), (5,))[0]
    assert torch.isfinite(found).all()
    assert found[0] == found[1] < found[2] == found[3]
