"""Theory checks of raj2026 at quick sizes; each has something that must fail."""

import numpy as np
import pytest

from mechicl.errors import InputError
from mechicl.plots.curves import draw
from mechicl.studies.checks import Outcome, get
from mechicl.theory import measurement, priors, strategies


def values(outcome: Outcome) -> dict[str, float]:
    return {each.quantity: each.value for each in outcome.measurements}


def test_strategies_on_a_small_tree() -> None:
    outcome = get("tree_strategies")(
        {}, depth=4, n_paths=50_000, n_steps=150, n_polish=60, n_draws=50
    )
    found = values(outcome)
    # CHECKED.md 2.4; the fixed measurement wins where one channel can say several spins.
    for count, expected in enumerate((0.46666667, 0.2, 0.0667208, 0.0010448), 1):
        assert found[f"adaptive, M = {count}"] == pytest.approx(expected, rel=0.15)
    assert found["adaptive, M = 1"] > found["non-adaptive, M = 1"]
    assert found["adaptive, M = 4"] < found["non-adaptive, M = 4"]
    assert 1 < found["adaptive wins from M"] <= 4
    assert found["non-adaptive over the best plain choice"] < 0.9
    spectrum = priors.tree_variances(4, 0.5)
    assert found["Gauss-PC, M = 3"] == measurement.gauss_pc_loss(spectrum, 3, 0.1)
    assert found["m*_sym"] == priors.symmetric_cutoff(4, 0.5, 0.1)
    assert found["m*_ada"] == priors.adaptive_cutoff(4, 0.5, 0.1)
    assert outcome.shown is not None
    assert outcome.shown["y"].sizes == {"curve": 4, "x": 4}
    symmetric = outcome.shown["y"].sel(curve="symmetric axes").values
    assert symmetric[3] == strategies.symmetric_loss(4, 0.5, 4, 0.1)
    assert draw(outcome.shown).axes[0].get_yscale() == "log"


def test_one_level_leaves_one_measurement() -> None:
    settings = {"depth": 1, "n_steps": 2, "n_polish": 1}
    noisy = get("tree_strategies")({}, tau=0.5, n_paths=20_000, n_draws=20_000, **settings)
    mine, fixed = noisy.measurements[:2]
    assert mine.error is not None
    assert fixed.error is not None
    assert abs(mine.value - fixed.value) < 4 * np.hypot(mine.error, fixed.error)
    # Where nothing is left there is no ratio.
    clear = values(get("tree_strategies")({}, tau=0.01, n_paths=100, n_draws=10, **settings))
    assert clear["adaptive, M = 1"] == clear["non-adaptive, M = 1"] == 0
    assert np.isnan(clear["non-adaptive over the best plain choice"])


def test_a_path_that_never_wins_has_no_first_m(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> tuple[float, float]:
        return 1.0, 0.0

    monkeypatch.setattr(strategies, "adaptive_loss", lost)
    settings = {"depth": 2, "n_paths": 2, "n_steps": 2, "n_polish": 1, "n_draws": 10}
    assert np.isnan(values(get("tree_strategies")({}, **settings))["adaptive wins from M"])


def test_a_gaussian_leaves_nothing_to_adapt_to_and_a_tree_does() -> None:
    outcome = get("no_adaptivity")({}, n_contexts=20_000, d=12)
    found = {each.quantity: each for each in outcome.measurements}
    for name in ("Gaussian: error, upper over lower half of |Phi|", "Gaussian: error over (15)"):
        error = found[name].error
        assert error is not None
        assert abs(found[name].value - 1) < 4 * error < 0.06
    assert found["Gaussian: greedy over top-M loss"].value == pytest.approx(1, abs=1e-9)
    control = found["tree: error, upper over lower half of |Phi|"]
    assert control.error is not None
    assert abs(control.value - 1) > 10 * control.error
    exact = found["tree: error over (20)"]
    assert exact.error is not None
    assert abs(exact.value - 1) < 4 * exact.error
    assert outcome.shown is not None
    np.testing.assert_allclose(outcome.shown["y"].mean("x"), 1, rtol=1e-12)
    spread = outcome.shown["y"].std("x").values
    assert spread[1] > 4 * spread[0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tree_strategies", {"depth": 0}),
        ("tree_strategies", {"alpha": 1}),
        ("tree_strategies", {"tau": 0}),
        ("no_adaptivity", {"n_contexts": 10}),
        ("no_adaptivity", {"tree_alpha": 1}),
    ],
)
def test_refused(name: str, settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"check '{name}'"):
        get(name)({}, **settings)
