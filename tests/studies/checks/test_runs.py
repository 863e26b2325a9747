"""Checks on runs, on hand-made runs whose circuits are known."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xarray as xr

from mechicl import analyses
from mechicl.errors import InputError
from mechicl.studies.checks import get
from tests import trajectories


class MadeRun:
    """Stands for a run: probes see a trajectory made by hand, or results that are given."""

    def __init__(
        self, trajectory: xr.Dataset, given: dict[str, Callable[..., xr.Dataset]] | None = None
    ) -> None:
        self.trajectory = trajectory
        self.seeds = trajectory["seed"].values
        self._given = given or {}

    def analyze(self, name: str, **settings: Any) -> xr.Dataset:
        if name in self._given:
            return self._given[name](**settings)
        return analyses.get(name)(self.trajectory, **settings)


def pair(**settings: object) -> MadeRun:
    """Four seeds at the end: a pair, a mismatched pair, heads of one sign, unequal |ω|."""
    start_mu = [[0.1, -0.1], [0.1, 0.1], [0.1, 0.1], [0.1, -0.1]]
    omega = [[0.2, -0.2], [0.2, -0.2], [0.2, 0.2], [0.3, -0.1]]
    mu = [[2.0, -2.0], [-2.0, 2.0], [2.0, 2.0], [2.0, -2.0]]
    both = np.array([start_mu, omega]), np.array([start_mu, mu])
    return MadeRun(trajectories.from_scales(*(np.swapaxes(x, 0, 1) for x in both), **settings))


def by_quantity(outcome: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for each in outcome.measurements:
        found.setdefault(each.quantity, []).append(each)
    return found


def test_the_effective_rate_is_of_seeds_that_reach_the_pattern() -> None:
    found = by_quantity(get("effective_learning_rate")({"x": pair(slope=0.5)}))
    counted = [not each.excluded for each in found["x"]]
    assert counted == [True, False, False, False]
    assert found["x"][0].value == pytest.approx(0.5 * (0.2 * 2 + 0.2 * 2))
    assert found["x: omega"][0].value == pytest.approx(0.2)
    assert found["x: mu"][0].value == pytest.approx(2.0)
    assert [each.value for each in found["x: in the pattern"]] == [1, 0, 0, 0]
    both = found["x: in the pattern, OV of both signs at the start"]
    assert [(each.seed, each.value) for each in both] == [(0, 1.0), (3, 0.0)]
    one = found["x: in the pattern, OV of one sign at the start"]
    assert [(each.seed, each.value) for each in one] == [(1, 0.0), (2, 0.0)]
    reasons = [each.excluded for each in found["x"]]
    assert len(set(reasons)) == 4


def curves(losses: np.ndarray, known: dict[str, np.ndarray]) -> Callable[..., xr.Dataset]:
    """Return a stand-in for `length_generalization` with known curves, (seed, length)."""

    def analyze(*, lengths: tuple[int, ...], n_prompts: int, references: bool) -> xr.Dataset:
        assert n_prompts > 0
        data = {
            "loss": (("seed", "step", "length"), losses[:, None]),
            "loss_error": (("seed", "step", "length"), 0.001 * losses[:, None]),
            "reference_loss": (("reference", "length"), np.stack(list(known.values()))),
        }
        coords = {
            "seed": np.arange(len(losses)),
            "step": [10],
            "length": list(lengths),
            "reference": (
                "reference",
                np.arange(len(known)),
                {
                    "flag_values": list(range(len(known))),
                    "flag_meanings": " ".join(known),
                },
            ),
        }
        return xr.Dataset(data, coords=coords)

    return analyze


def test_loss_curves_are_compared_from_a_length_on_and_for_seeds_that_count() -> None:
    good = trajectories.from_scales([[[0.2, -0.2]], [[0.2, 0.2]]], [[[2.0, -2.0]], [[2.0, 2.0]]])
    own = np.array([[9.0, 2.0, 1.0], [90.0, 20.0, 10.0]])  # the second seed does not count
    references = {"ridge": np.array([1.0, 0.5, 0.25]), "gd": np.array([1.0, 2.0, 1.02])}
    runs = {
        "base": MadeRun(good, {"length_generalization": curves(own, references)}),
        "same": MadeRun(good, {"length_generalization": curves(own * 1.01, references)}),
        "bad": MadeRun(good, {"length_generalization": curves(own * 3, references)}),
    }
    check = get("loss_curves")
    settings = {"base": "base", "worse": "bad", "references": ["gd"], "lengths": [10, 20, 40]}
    found = by_quantity(check(runs, **settings))
    counted = {name: [e.value for e in each if not e.excluded] for name, each in found.items()}
    assert counted["same against base"] == pytest.approx([0.01])
    assert counted["base against gd"] == pytest.approx([1 - 1 / 1.02])  # 9 against 1 is before 20
    assert counted["base over ridge"] == pytest.approx([4.0])
    assert counted["standard error"] == pytest.approx([0.001])
    worse = (1.0) / np.mean([3.0, 30.0])
    assert counted["base over bad"] == pytest.approx([worse])
    with pytest.raises(InputError, match=r"no reference 'debiased'.*Known: gd, ridge"):
        check(runs, **settings | {"references": ["debiased"]})
    for change in ({"base": "none"}, {"worse": "none"}, {"at": 41}, {"from_length": 41}):
        with pytest.raises(InputError, match="are to be among the runs"):
            check(runs, **settings | change)


def test_growth_with_length() -> None:
    trajectory = trajectories.from_scales([[[0.2, -0.2]]] * 2, [[[2.0, -2.0]]] * 2)
    losses = np.array([[4.0, 2.0, 1.0], [4.0, 2.0, 6.0]])
    run = MadeRun(trajectory, {"length_generalization": curves(losses, {"ridge": losses[0]})})
    settings = {"lengths": [10, 40, 100]}
    outcome = get("length_growth")({"x": run, "y": run}, rising=["y"], **settings)
    found = by_quantity(outcome)
    assert [each.value for each in found["x: error at 40 over 100"]] == [2.0, 2.0 / 6.0]
    assert [each.value for each in found["y: error at 100 over 40"]] == [0.5, 3.0]
    assert [each.value for each in found["x: error at 40"]] == [2.0, 2.0]
    assert outcome.shown["y"].values.tolist() == [[4.0, 2.0, 3.5]] * 2
    with pytest.raises(InputError, match="rising"):
        get("length_growth")({"x": run}, rising=["z"], **settings)


def test_allocation_compares_regimes() -> None:
    def analyze() -> xr.Dataset:
        flags = {"flag_values": [0, 3], "flag_meanings": "task_not_served superposition"}
        values = np.array([[0.0, 3.0], [3.0, 0.0], [3.0, np.nan]])
        return xr.Dataset(
            {"regime": (("seed", "step"), values, flags)},
            coords={"seed": [4, 5, 6], "step": [0, 9]},
        )

    trajectory = trajectories.from_scales([[[0.2]]] * 3, [[[2.0]]] * 3)
    run = MadeRun(trajectory, {"task_allocation": analyze})
    outcome = get("allocation")({"H": run}, expected={"H": "superposition"})
    assert [(e.quantity, e.seed, e.value) for e in outcome.measurements] == [
        ("H: superposition", 4, 1.0),
        ("H: superposition", 5, 0.0),
        ("H: superposition", 6, 0.0),
    ]
    with pytest.raises(InputError, match="accepted: task_not_served, superposition"):
        get("allocation")({"H": run}, expected={"H": "super"})


def test_a_probe_holds_by_a_step_and_for_good() -> None:
    omega = np.array([[[0.2], [-0.2], [0.2], [0.2]], [[0.2], [0.2], [0.2], [-0.2]]])
    trajectory = trajectories.from_scales(omega, np.full((2, 4, 1), 2.0))  # steps 0, 10, 20, 30
    check = get("probe_holds")
    for by, expected in ((None, [1.0, 0.0]), (20, [1.0, 0.0]), (19, [0.0, 0.0])):
        found = check({"x": MadeRun(trajectory)}, probes=["sign_matching"], by=by)
        assert [each.value for each in found.measurements] == expected
    named = check({"a": MadeRun(trajectory), "b": MadeRun(trajectory)}, probes=["sign_matching"])
    assert {each.quantity for each in named.measurements} == {
        "a: sign_matching",
        "b: sign_matching",
    }
    assert named.shown.attrs["probe"] == "sign_matching"
    assert named.shown.attrs["run_label"] == "a" and "run_label" not in found.shown.attrs


def test_a_probes_value_is_that_of_the_last_step_over_heads() -> None:
    omega = np.array([[[9.0, 9.0], [0.2, -0.4]]])
    run = MadeRun(trajectories.from_scales(omega, 2 * omega))
    check = get("probe_value")
    for absolute, expected in ((False, -0.1), (True, 0.3)):
        found = check({"x": run}, probe="circuits", variables=["omega"], absolute=absolute)
        assert [each.value for each in found.measurements] == pytest.approx([expected])
    with pytest.raises(InputError, match="has dims"):
        check({"x": run}, probe="circuits", variables=["KQ"])
    with pytest.raises(InputError, match=r"no variable of probe 'circuits' 'omga'.*'omega'"):
        check({"x": run}, probe="circuits", variables=["omga"])
    with pytest.raises(InputError, match="there is no probe 'circus'"):
        check.resolve({"probe": "circus", "variables": ["omega"]})


def test_manifold_and_single_head_on_known_scales() -> None:
    run = pair()
    found = by_quantity(get("on_manifold")({"x": run}))
    first = found["x: eta over eta*"][0]
    assert first.value == pytest.approx(0.8 / 0.8791208791208791)
    assert [not each.excluded for each in found["x: mu over (4.6)"]] == [True, False, False, True]
    head = MadeRun(trajectories.from_scales([[[0.1], [-0.52]]], [[[0.1], [-1.42]]]))
    found = by_quantity(get("single_head_optimum")({"x": head}))
    assert found["trained omega"][0].value == pytest.approx(0.52)
    assert found["trained mu"][0].value == pytest.approx(1.42)
