"""Checks of yuksel2026: on results that are given, and on flows at quick sizes."""

import numpy as np
import pytest
import xarray as xr

from mechicl.errors import InputError
from mechicl.studies.checks import get
from tests.studies.checks.given import GivenRun, by_quantity

STEPS = [0, 10, 20, 30, 40]


def stages(entered: list[list[float]], phase: list[list[int]]) -> GivenRun:
    """Say when each block is entered, (seed, block), and which phase it is, (seed, step)."""
    at = np.array(entered)
    ordered = np.isfinite(at).all(1) & (np.diff(at, axis=1) >= 0).all(1)
    flags = {
        "flag_values": [0, 1, 2, 3],
        "flag_meanings": "before_any_block competitive cooperative all_blocks_entered",
    }
    return GivenRun(
        xr.Dataset(
            {
                "entered": (("seed", "block"), at),
                "phase": (("seed", "step"), np.array(phase, float), flags),
                "in_order": ("seed", ordered.astype(float)),
                "n_stages": ("seed", np.isfinite(at).sum(1).astype(float)),
                "transition_step": (("seed", "curve", "transition"), np.stack([-at, at], 1)),
            },
            coords={
                "seed": np.arange(len(at)),
                "step": STEPS,
                "block": [1, 2],
                "curve": ("curve", [0, 1], {"flag_values": [0, 1], "flag_meanings": "mass loss"}),
            },
        )
    )


LATE = stages([[10, 30], [20, 40]], [[0, 1, 1, 3, 3], [0, 0, 2, 2, 3]])
NEVER = stages([[10, np.nan], [np.nan, np.nan]], [[0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])


def test_stages_of_one_run_and_of_several() -> None:
    one = get("attention_stages")({"a": LATE}, n_steps=7)
    assert LATE.asked == {"name": "learning_stages", "n_steps": 7}
    found = by_quantity(one)
    assert found["in order"] == [1, 1]
    assert found["competes first"] == [1, 0]
    assert found["stages"] == [2, 2]
    assert found["loss transitions"] == [2, 2]
    assert found["block 2 entered"] == [30, 40]
    assert one.shown is not None
    both = get("attention_stages")({"a": LATE, "b": NEVER}, label_shown="b")
    assert both.shown is not None
    assert both.shown.attrs["run_label"] == "b"
    several = by_quantity(both)
    assert several["b: in order"] == [0, 0]
    assert several["b: loss transitions"] == [1, 0]
    np.testing.assert_array_equal(several["b: competes first"], [1, np.nan])
    np.testing.assert_array_equal(several["b: block 2 entered"], [np.nan, np.nan])


def test_times_along_runs_never_fall_and_what_is_not_reached_is_last() -> None:
    check = get("stages_along")
    rising = by_quantity(check({"a": LATE, "b": NEVER}, rises="block 2 entered"))
    assert rising["rises along the runs"] == [1, 1]
    falling = by_quantity(check({"a": NEVER, "b": LATE}, rises="block 2 entered"))
    assert falling["rises along the runs"] == [0, 0]
    level = by_quantity(check({"a": LATE, "b": LATE}, rises="stages"))
    assert level["rises along the runs"] == [0, 0]
    assert by_quantity(check({"a": NEVER, "b": LATE}, rises="stages"))["rises along the runs"] == [
        1,
        1,
    ]
    with pytest.raises(InputError, match="two at least"):
        check({"a": LATE}, rises="stages")
    with pytest.raises(InputError, match=r"rises is one of .*'stages'.*; given 'stage'"):
        check({"a": LATE, "b": LATE}, rises="stage")


def divergences(least_at: list[list[int]]) -> GivenRun:
    """Give curves, a parabola each, that are least at (seed, reference)."""
    names = ["KL(trained:c=4||model)", "KL(trained:c=8||model)"]
    names += [f"KL({name}||model)" for name in ("blocks_1", "generator")]
    at = np.array(least_at, float)[:, None, :]
    kl = (np.array(STEPS)[None, :, None] - at) ** 2 + 0.5
    flags = {"flag_values": list(range(4)), "flag_meanings": " ".join(names)}
    return GivenRun(
        xr.Dataset(
            {"kl": (("seed", "step", "reference"), kl)},
            coords={
                "seed": [0, 1],
                "step": STEPS,
                "reference": ("reference", np.arange(4), flags),
            },
        )
    )


def test_dips_come_in_order_or_not() -> None:
    model = divergences([[10, 20, 10, 40], [30, 20, 20, 20]])
    runs = {"m": model, "c=4": LATE, "c=8": LATE}
    found = by_quantity(get("dips_in_order")(runs, model="m", against=("c=4", "c=8")))
    assert list(model.asked["against"]) == ["c=4", "c=8"]
    assert found["trained: dips in order"] == [1, 0]
    assert found["blocks: dips in order"] == [1, 0]
    assert found["trained:c=8: nearest at"] == [20, 20]
    assert found["generator: nearest"] == [0.5, 0.5]
    with pytest.raises(InputError, match="c=9 is none of the runs: m, c=4"):
        get("dips_in_order")({"m": model, "c=4": LATE}, model="m", against=("c=9",))


def test_a_seed_without_a_reference_is_undefined() -> None:
    model = divergences([[10, 20, 10, 40], [30, 20, 20, 20]])
    model.analyze("")["kl"][0, :, 0] = np.nan
    runs = {"m": model, "c=4": LATE, "c=8": LATE}
    found = by_quantity(get("dips_in_order")(runs, model="m", against=("c=4", "c=8")))
    np.testing.assert_array_equal(found["trained: dips in order"], [np.nan, 0])
    assert found["blocks: dips in order"] == [1, 0]


def test_the_flow_keeps_what_the_theorems_say() -> None:
    found = by_quantity(get("factorization_stages")({}, n_starts=6))
    assert found["Theorem 1: order lost"] == [0]
    assert found["Theorem 1: another feature"] == [0]
    assert 0 < found["Theorem 2: parting time, farther start over nearer"][0] < 0.6
    assert found["Eq. 8: distance from the full flow"][0] < 1e-8
    assert found["Theorem 4: largest rise"][0] < 0
    assert found["loss: largest rise"][0] < 0
    many = by_quantity(get("factorization_stages")({}, n_starts=16, seed=3))
    assert many["Theorem 1: another feature, without (5)"][0] > 0
    swapped = by_quantity(get("factorization_stages")({}, n_starts=1, deviations=(1e-6, 1e-4)))
    assert swapped["Theorem 2: parting time, farther start over nearer"][0] > 1.6
