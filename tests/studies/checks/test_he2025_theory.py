"""Theory checks against known values, at quick sizes; each has something that must fail."""

import numpy as np
import pytest

from mechicl.errors import InputError
from mechicl.studies.checks import get
from mechicl.theory import linear_regression


def values(name: str, **settings: object) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in get(name)({}, **settings).measurements:
        if not each.excluded:
            found.setdefault(each.quantity, []).append(each.value)
    return found


def test_the_gap_of_the_approximation_shrinks_as_the_exact_risk_says() -> None:
    """η*/L is the risk of debiased descent less the floor of L̃ (CHECKED: 0.021964(52) at 40)."""
    outcome = get("approximation_gap")({}, lengths=(40, 160), n_samples=60_000)
    for each, length in zip(outcome.measurements, (40, 160), strict=True):
        at = {"d": 5, "noise_variance": 0.1, "n_context": length}
        exact = linear_regression.optimal_learning_rate(**at) / length
        assert each.error is not None and each.error < 0.02 * exact
        assert abs(each.value - exact) < 4 * each.error + 0.005 * exact
    far = get("approximation_gap")({}, lengths=(40,), gamma=1.0, n_samples=20_000).measurements[0]
    assert far.value < -50 * far.error  # beyond |ω| = 1/√d the approximation is too high


def test_descent_meets_the_published_stages_and_the_absorbing_state() -> None:
    found = values("descent_stages", n_starts=16, n_steps=20_000, heads=(2,))
    assert 1 <= len(found["H=2: (4.3) at the end"]) < 16
    np.testing.assert_allclose(found["H=2: (4.3) at the end"], 1, atol=0.01)
    np.testing.assert_allclose(found["H=2: (4.3) at the end, one sign"], 0.828017, atol=1e-5)
    assert np.mean(found["H=2: ends with both signs"]) == len(found["H=2: (4.3) at the end"]) / 16
    assert set(found["H=2: signs and zero sum before one |omega|"]) <= {0.0, 1.0}
    short = values("descent_stages", n_starts=16, n_steps=100, heads=(3,))
    assert min(short["H=3: (4.3) at the end"]) < 0.9


def test_the_limit_of_a_pair_of_heads() -> None:
    found = values("debiased_limit", n_contexts=500)
    assert found["slope, balanced"][0] == pytest.approx(2, abs=0.05)
    assert found["slope, unbalanced"][0] == pytest.approx(-1, abs=0.1)
    assert found["share within the bound"] == [1.0]
    wide = values("debiased_limit", n_contexts=500, gammas=(3.0, 2.0))
    assert abs(wide["slope, balanced"][0] - 2) > 0.5


def test_the_limiting_ratio_is_within_its_bound_and_the_real_one_is_not() -> None:
    found = values("limiting_ratio", n_contexts=10, d=100, n_context=200, grid=20)
    assert found["share of the grid within the bound"] == [1.0]
    assert found["simulated over limiting Bayes risk"][0] == pytest.approx(1, abs=0.02)
    assert found["ratio at d = 5, L = 40"][0] == pytest.approx(2.122, rel=0.01)
    assert found["bound there"][0] == pytest.approx(2.0853344187)
    small = values("limiting_ratio", n_contexts=200, d=2, n_context=4, grid=5)
    assert abs(small["simulated over limiting Bayes risk"][0] - 1) > 0.02


@pytest.mark.parametrize("name", ["debiased_limit", "linear_as_softmax"])
@pytest.mark.parametrize("gammas", [(), (0.1,), (0.1, 0.1), (0.0, 0.1), (-0.1, 0.1)])
def test_a_slope_needs_two_scales_above_zero(name: str, gammas: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="gammas"):
        get(name).resolve({"gammas": gammas})


def test_a_slope_of_what_has_no_logarithm_is_undefined() -> None:
    from mechicl.studies.checks.he2025_theory import _slope

    x = np.array([0.1, 0.2, 0.4])
    assert _slope(x, 3 * x**2) == pytest.approx(2)
    for wrong in (0.0, np.inf, np.nan):
        assert np.isnan(_slope(x, np.array([1.0, wrong, 2.0])))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("approximation_gap", {"gamma": 0.0}),
        ("approximation_gap", {"lengths": ()}),
        ("approximation_gap", {"n_samples": 10}),
        ("descent_stages", {"heads": ()}),
        ("descent_stages", {"spread": 0.0}),
        ("descent_stages", {"learning_rate": -1.0}),
        ("limiting_ratio", {"n_contexts": 1}),
        ("limiting_ratio", {"grid": 1}),
        ("limiting_ratio", {"noise_variance": 0.0}),
        ("on_manifold", {"grid": 1}),
    ],
)
def test_settings_that_leave_nothing_to_measure_are_refused(
    name: str, settings: dict[str, object]
) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        get(name).resolve(settings)


def test_softmax_heads_imitate_linear_ones() -> None:
    found = values("linear_as_softmax", n_contexts=100)
    assert found["slope"][0] == pytest.approx(2, abs=0.1)
    assert abs(found["slope, term left out"][0]) < 0.05
    seeds = {values("linear_as_softmax", n_contexts=100, seed=seed)["slope"][0] for seed in (1, 2)}
    assert len(seeds) == 2


def test_the_single_heads_optimum() -> None:
    found = values("single_head_optimum")
    assert found["L~: omega"][0] == pytest.approx(5**-0.5, rel=1e-6)
    assert found["L~: mu"][0] == pytest.approx(1.6276947020, rel=1e-6)
    assert found["true loss: omega"][0] == pytest.approx(0.5174, abs=0.003)  # CHECKED 0.5174(4)
    assert found["true loss: mu"][0] == pytest.approx(1.497, abs=0.006)


def test_the_loss_on_the_manifold_grows() -> None:
    assert values("on_manifold")["L~ grows with gamma"] == [1.0]
