"""Features against their definition and the moments of the Haar law."""

from collections.abc import Callable

import numpy as np
import pytest

from mechicl.errors import InputError
from mechicl.theory.features import gram_schmidt, haar_features, orthogonalised

D = 3
FEATURES = np.random.default_rng(5).standard_normal((3, D, D)) * np.array([3, 2, 1])[:, None, None]


def test_haar_features_are_scaled_orthogonal_matrices() -> None:
    found = haar_features(3, 8, ratio=1.7, base=20, rng=np.random.default_rng(0))
    assert found.shape == (3, 8, 8)
    for matrix, scale in zip(found, (20 * 1.7**2, 20 * 1.7, 20), strict=True):
        np.testing.assert_allclose(matrix @ matrix.T, scale**2 * np.eye(8), atol=1e-10 * scale**2)
    again = haar_features(3, 8, ratio=1.7, base=20, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(found, again)
    assert haar_features(1, 2, ratio=0, base=1, rng=np.random.default_rng(0)).shape == (1, 2, 2)


def test_haar_features_are_uniform() -> None:
    """Moments of the Haar law; bare QR factors have diagonals with a mean."""
    n, d = 4000, 3
    rng = np.random.default_rng(1)
    found = haar_features(n, d, ratio=1, base=1, rng=rng)
    bare = np.linalg.qr(rng.standard_normal((n, d, d)))[0]
    for power, expected in ((1, 0), (2, 1 / d), (3, 0), (4, 3 / (d * (d + 2)))):
        moments = found**power
        error = moments.std(0) / np.sqrt(n)
        assert (np.abs(moments.mean(0) - expected) < 4 * error).all()
    biased = np.abs(bare.mean(0)) / (bare.std(0) / np.sqrt(n))
    assert biased.max() > 20
    assert abs((np.linalg.det(found) > 0).mean() - 0.5) < 0.04


def test_gram_schmidt() -> None:
    basis, coordinates = gram_schmidt(FEATURES)
    np.testing.assert_allclose(np.tensordot(coordinates, basis, 1), FEATURES, atol=1e-14)
    flat = basis.reshape(3, -1)
    np.testing.assert_allclose(flat @ flat.T, np.eye(3), atol=1e-14)
    np.testing.assert_array_equal(np.triu(coordinates, 1), 0)
    assert (np.diagonal(coordinates) > 0).all()
    orthogonal = np.arange(1, 4)[:, None, None] * basis
    np.testing.assert_allclose(gram_schmidt(orthogonal)[1], np.diag([1, 2, 3]), atol=1e-14)
    # More features than entries: fewer coordinates, the same features.
    many = np.random.default_rng(0).standard_normal((3, 2))
    few, spread = gram_schmidt(many)
    assert few.shape == (2, 2)
    np.testing.assert_allclose(spread @ few, many, atol=1e-14)


def test_orthogonalised() -> None:
    found = orthogonalised(FEATURES)
    flat, given = found.reshape(3, -1), FEATURES.reshape(3, -1)
    np.testing.assert_allclose(flat @ flat.T, np.diag((given**2).sum(1)), atol=1e-12)
    np.testing.assert_allclose(found[0], FEATURES[0], rtol=1e-13)
    assert np.abs(given @ given.T - flat @ flat.T).max() > 0.1
    np.testing.assert_allclose(orthogonalised(found), found, atol=1e-13)
    for bad in (np.stack([FEATURES[0], 2 * FEATURES[0]]), np.ones((2, 1, 1))):
        with pytest.raises(InputError, match="feature 1 is in the span of those before it"):
            orthogonalised(bad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gram_schmidt(np.zeros(3)), "accepted: (block, ...), at least one, all finite"),
        (
            lambda: haar_features(0, 3, ratio=1, base=1, rng=np.random.default_rng(0)),
            "n_blocks is an integer from 1; given 0",
        ),
        (
            lambda: haar_features(2, 3, ratio=-1, base=1, rng=np.random.default_rng(0)),
            "ratio = -1; accepted: a finite number of at least 0",
        ),
        (
            lambda: haar_features(3, 3, ratio=1e200, base=1, rng=np.random.default_rng(0)),
            "ratio = 1e+200 and base = 1 make inf of the first of 3 blocks",
        ),
        (lambda: orthogonalised(FEATURES[0]), "features have shape (3, 3), 0 numbers"),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
