"""Conditions of the theorems, by hand; test_factorization_flow holds them along flows."""

import numpy as np
import pytest

from mechicl.theory.flow_conditions import head_deviation, order_margin

FEATURES = np.diag([2.89, 1.7, 1.0])


def test_order_margin_by_hand() -> None:
    v, s = np.array([1.0, 1.0, 0.5]), np.array([0.4, 0.3, 0.1, 0.05, 0.15])
    # ⟨A*_j, V⟩ = 2.89, 1.7, 0.5; the third position is below the fifth.
    assert order_margin(FEATURES, v, s) == pytest.approx(-0.05)
    assert order_margin(FEATURES, v, s[[0, 1, 4, 2, 3]]) == pytest.approx(0.05)
    assert order_margin(FEATURES, v, s, top_only=True) == pytest.approx(0.1)
    assert order_margin(FEATURES, [0.1, 1.0, 0.5], s, top_only=True) == pytest.approx(-1.411)
    assert order_margin(FEATURES, [1.0, 1.0, -0.5], s[[0, 1, 4, 2, 3]]) == pytest.approx(-0.5)
    assert order_margin(FEATURES, [-1.0, -2.0, -3.0], s, top_only=True) == pytest.approx(-2.89)
    assert order_margin(FEATURES, np.zeros(3), np.full(4, 0.25)) == 0
    path = np.stack([v, v]), np.stack([s, s[[0, 1, 4, 2, 3]]])
    assert order_margin(FEATURES, *path) == pytest.approx([-0.05, 0.05])
    assert np.isnan(order_margin(FEATURES, v * np.nan, s))
    turned = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    rotated = order_margin(FEATURES @ turned, v @ turned, s[[0, 1, 4, 2, 3]])
    assert rotated == pytest.approx(0.05)


def test_head_deviation_by_hand() -> None:
    values = np.zeros((2, 3, 2, 2))
    values[1, 2] = [[3, 0], [0, 4]]
    s = np.full((2, 3, 4), 0.25)
    assert head_deviation(values, s).tolist() == [0, 5]
    s[0, 1] = [1, 0, 0, 0]
    assert head_deviation(values, s) == pytest.approx([0.75**0.5, 5])
    values[1, 0, 0, 0] = np.nan
    assert np.isnan(head_deviation(values, s)).tolist() == [False, True]
