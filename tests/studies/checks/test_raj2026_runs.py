"""Checks of raj2026 on models, on results that are given."""

import numpy as np
import pytest
import xarray as xr

from mechicl.errors import InputError
from mechicl.studies.checks import get
from tests.studies.checks.given import GivenRun, by_quantity

STRATEGIES = {"flag_values": [0, 1], "flag_meanings": "non_adaptive gauss_pc"}
MODEL = ("seed", "step")


def losses(*values: float) -> GivenRun:
    """Say what each seed loses at the last step, and 9 at the one before."""
    last = np.array(values)
    result = xr.Dataset(
        {
            "loss": (MODEL, np.stack([9 + 0 * last, last], 1)),
            "loss_error": (MODEL, np.full((len(last), 2), 0.01)),
            "strategy_loss": ("strategy", [0.5, 2.0]),
            "strategy_error": ("strategy", [0.1, 0.0]),
        },
        coords={
            "seed": np.arange(len(last)),
            "step": [0, 10],
            "strategy": ("strategy", [0, 1], STRATEGIES),
        },
    )
    return GivenRun(result, np.linspace(3, last, 100).T)


def test_losses_are_held_against_strategies_and_runs() -> None:
    runs = {"A": losses(0.2, 0.3, 0.4), "B": losses(1.0, 1.2, 1.4)}
    outcome = get("losses_of_strategies")(
        runs,
        against=[["A", "non_adaptive"], ["A", "B"], ["B", "gauss_pc"]],
        below=[["A", "B"], ["A", "non_adaptive"], ["B", "A"]],
        n_prompts=50,
    )
    assert runs["A"].asked == {"name": "mmse", "n_prompts": 50}
    found = by_quantity(outcome)
    assert found["A over non_adaptive"] == pytest.approx([0.4, 0.6, 0.8])
    assert found["A over B"] == pytest.approx([0.2 / 1.2, 0.25, 0.4 / 1.2])
    assert found["B over gauss_pc"] == pytest.approx([0.5, 0.6, 0.7])
    assert found["A below B, in spreads"] == pytest.approx([0.9 / np.hypot(0.1, 0.2)])
    assert found["A below B by the spread"] == [1]
    assert found["A below non_adaptive, in spreads"] == pytest.approx([0.2 / np.hypot(0.1, 0.1)])
    assert found["B below A by the spread"] == [0], "the control: the order turned round"
    assert found["largest over smallest mean"] == pytest.approx([4.0])
    errors = [each.error for each in outcome.measurements if each.quantity == "A over B"]
    assert errors == pytest.approx([0.01 / 1.2] * 3)
    assert list(outcome.shown["curve"].values) == ["A", "B", "non adaptive", "gauss pc"]
    assert np.isfinite(outcome.shown["y"]).all()
    assert outcome.shown["y"].sel(curve="A")[-1] == pytest.approx(0.3, abs=0.2)


def test_the_figure_is_as_long_as_the_longest_run() -> None:
    short, long = losses(0.2, 0.3), losses(1.0, 1.2)
    short.metrics = short.metrics.isel(log_step=slice(10))
    shown = get("losses_of_strategies")({"A": short, "B": long}, against=[["A", "B"]]).shown
    assert shown["x"][-1] > 90
    drawn = np.isfinite(shown["y"])
    assert drawn.sel(curve="B").all()
    assert (drawn.sel(curve="A") == (shown["x"] < 10)).all()


def test_one_seed_has_no_spread() -> None:
    runs = {"A": losses(0.2), "B": losses(1.0)}
    found = by_quantity(get("losses_of_strategies")(runs, below=[["A", "B"]]))
    assert np.isnan(found["A below B, in spreads"]).all()
    assert np.isnan(found["A below B by the spread"]).all()


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([["D", "gauss_pc"]], "D is none of the runs: A"),
        ([["A", "luck"]], "'luck' is no run and no strategy: A, non_adaptive, gauss_pc"),
    ],
)
def test_pairs_that_are_not_there_are_refused(pairs: list[list[str]], said: str) -> None:
    for setting in ("against", "below"):
        with pytest.raises(InputError, match=said):
            get("losses_of_strategies")({"A": losses(0.2, 0.3)}, **{setting: pairs})


def keys(holds: float, effect: float) -> GivenRun:
    increase = np.zeros((2, 1, 3, 3))
    increase[:, :, 0, 2] = effect
    result = xr.Dataset(
        {
            "increase": ((*MODEL, "patch_layer", "tree_distance"), increase),
            "holds": (MODEL, [[holds], [holds]]),
            "effect": (MODEL, [[effect], [effect]]),
            "clean_loss": (MODEL, [[0.5], [0.5]]),
            "same_leaf": (MODEL, [[-0.01], [0.01]]),
        },
        coords={"seed": [0, 3], "step": [10]},
    )
    return GivenRun(result)


def test_patched_keys_and_their_control() -> None:
    outcome = get("keys_patched")({"A": keys(1, 0.25), "B": keys(0, 0.0)}, without="B")
    found = by_quantity(outcome)
    assert found["A: costs more the farther and the earlier"] == [1, 1]
    assert found["A: farthest leaf over no patch"] == pytest.approx([1.5, 1.5])
    assert found["A: same leaf"] == pytest.approx([-0.04, 0.04])
    assert found["B: largest change"] == [0, 0]
    assert outcome.shown.attrs["run_label"] == "A"
    both = by_quantity(get("keys_patched")({"A": keys(1, 0.25), "B": keys(0, -0.1)}))
    assert both["B: costs more the farther and the earlier"] == [0, 0]
    assert by_quantity(get("keys_patched")({"B": keys(0, -0.1)}, without="B")) == {
        "B: largest change": [0.1, 0.1]
    }
    with pytest.raises(InputError, match="C is none of the runs"):
        get("keys_patched")({"A": keys(1, 0.25)}, without="C")


def test_transplanted_workspaces() -> None:
    layer = (*MODEL, "layer")
    result = xr.Dataset(
        {
            "follows": (layer, [[[0, 0], [0.25, 1.0]]]),
            "last_follows": (MODEL, [[0, 1.0]]),
            "donor_loss": (layer, [[[9, 9], [3.0, 0.6]]]),
            "clean_loss": (MODEL, [[9, 0.5]]),
            "foreign_loss": (MODEL, [[9, 2.0]]),
            "self_change": (layer, [[[9, 9], [0.0, 0.0]]]),
        },
        coords={"seed": [4], "step": [0, 10]},
    )
    found = by_quantity(get("workspace_transplanted")({"A": GivenRun(result)}))
    assert found == {
        "follows after the last layer": [1],
        "donor's loss over clean loss": pytest.approx([1.2]),
        "donor's loss over foreign loss": pytest.approx([0.3]),
        "change by its own workspace": [0],
        "follows after layer 1": [0.25],
    }
    several = get("workspace_transplanted")({"A": GivenRun(result), "B": GivenRun(result)})
    assert {each.split(": ")[0] for each in by_quantity(several)} == {"A", "B"}
