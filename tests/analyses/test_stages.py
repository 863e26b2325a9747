"""The definition of a stage, dips and change points, against loops and curves that are known."""

import itertools

import numpy as np
import pytest
import xarray as xr
from ruptures.costs import CostLinear

from mechicl.analyses.probe import since
from mechicl.analyses.stages import (
    Fall,
    _costs,
    _shifts,
    count_stages,
    dip_or_fall,
    first_for_good,
    stage_entries,
    transitions,
)
from mechicl.errors import InputError

STEPS = np.append(0, np.unique(np.rint(np.geomspace(1, 2000, 110)))).astype(int)
X = np.log1p(STEPS)


# --- the definition of a stage --------------------------------------------------------------------

AT = np.array([0, 10, 30, 100, 300])
WITHOUT = np.array([[1.0, 9.0], [1.2, 0.4]])
"""KL(blocks_i ‖ blocks_{j−1}); entry (1, 2) is read by nothing."""


def staged(mass: object, kl: object) -> np.ndarray:
    return stage_entries(AT, np.array(mass, float), np.array(kl, float), WITHOUT)


FIRST = [0.2, 0.4, 0.5, 0.9, 0.9]
SECOND = [0.2, 0.2, 0.1, 0.3, 0.7]
GOOD = list(zip([1.0, 0.6, 0.3, 0.4, 0.5], [1.2, 0.9, 0.5, 0.3, 0.1], strict=True))


def one_head(first: list[float], second: list[float]) -> list[list[list[float]]]:
    return [[list(pair)] for pair in zip(first, second, strict=True)]


def test_entries_are_where_the_mass_has_risen_for_good():
    np.testing.assert_array_equal(staged(one_head(FIRST, SECOND), GOOD), [30, 300])


def test_a_rise_counts_from_where_the_head_began():
    late = [0.6, 0.7, 0.8, 0.84, 0.9]  # 0.85 is to be passed
    np.testing.assert_array_equal(staged(one_head(late, SECOND), GOOD), [300, 300])


def test_a_head_that_leaves_again_has_not_entered():
    gone = [0.2, 0.9, 0.9, 0.9, 0.4]
    np.testing.assert_array_equal(staged(one_head(gone, SECOND), GOOD), [np.nan, 300])
    again = [0.2, 0.9, 0.4, 0.9, 0.9]
    np.testing.assert_array_equal(staged(one_head(again, SECOND), GOOD), [100, 300])


def test_one_and_the_same_head_stays():
    early, late = [0.2, 0.9, 0.9, 0.2, 0.2], [0.2, 0.2, 0.2, 0.9, 0.9]
    both = np.stack([early, late], -1)[..., None].repeat(2, -1)
    np.testing.assert_array_equal(staged(both, GOOD), [100, 100])
    np.testing.assert_array_equal(staged(both[:, ::-1], GOOD), [100, 100])


def test_attention_that_is_not_used_is_no_stage():
    """The divergence from blocks_2 has to fall below half of what block 1 leaves: 0.2."""
    unused = [[first, max(second, 0.2)] for first, second in GOOD]
    np.testing.assert_array_equal(staged(one_head(FIRST, SECOND), unused), [30, np.nan])
    dipped = [[first, second] for first, second in GOOD]
    dipped[2][1], dipped[-1][1] = 0.19, 0.5  # a dip is as good as a fall
    np.testing.assert_array_equal(staged(one_head(FIRST, SECOND), dipped), [30, 300])
    nothing = [[1.0, 1.2]] * 5
    assert np.isnan(staged(one_head(FIRST, SECOND), nothing)).all()


def test_a_divergence_that_is_low_from_the_start_has_not_fallen():
    low = [[0.3, 0.1]] * 5
    assert np.isnan(staged(one_head(FIRST, SECOND), low)).all()


def test_a_later_reference_shows_an_earlier_block_but_not_the_other_way_round():
    """Blocks that are entered last to first never bring the model near blocks_1."""
    away = [[1.0 + first, second] for first, second in GOOD]
    np.testing.assert_array_equal(staged(one_head(FIRST, SECOND), away), [30, 300])
    only_first = [[first, 1.0] for first, _ in GOOD]
    np.testing.assert_array_equal(staged(one_head(FIRST, SECOND), only_first), [30, np.nan])


def test_undefined_curves_have_no_stages():
    for where in ((3, 0, 1), (4, 0, 0)):
        mass = np.array(one_head(FIRST, SECOND))
        mass[where] = np.nan
        assert np.isnan(staged(mass, GOOD)).all()
    kl = np.array(GOOD)
    kl[2, 1] = np.nan
    assert np.isnan(staged(one_head(FIRST, SECOND), kl)).all()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"mass \(5, 1, 2\), kl \(5, 2\).*accepted: \(step,\)"):
        stage_entries(AT[:4], np.array(one_head(FIRST, SECOND)), np.array(GOOD), WITHOUT)
    with pytest.raises(InputError, match=r"without \(1, 2\)"):
        stage_entries(AT, np.array(one_head(FIRST, SECOND)), np.array(GOOD), WITHOUT[:1])


def test_entries_against_loops():
    rng = np.random.default_rng(0)
    entered = 0
    for _ in range(200):
        mass = rng.choice([0.1, 0.3, 0.6, 0.9], size=(5, 3, 2), p=[0.2, 0.2, 0.3, 0.3])
        mass[0] = rng.choice([0.1, 0.3], size=(3, 2))
        kl, without = rng.random((5, 2)), 2 * rng.random((2, 2))
        want = []
        for block in range(2):
            first = np.nan
            for head, index in itertools.product(range(3), range(5)):
                stays = all(m > mass[0, head, block] + 0.25 for m in mass[index:, head, block])
                first = np.fmin(first, AT[index]) if stays else first
            near = [
                min(kl[:, i]) < 0.5 * without[i, block] and min(kl[:, i]) < kl[0, i]
                for i in range(block, 2)
            ]
            want.append(first if any(near) else np.nan)
        found = stage_entries(AT, mass, kl, without)
        np.testing.assert_array_equal(found, want)
        entered += int(np.isfinite(found).sum())
    assert 50 < entered < 350


def test_first_for_good_is_since():
    holds = np.random.default_rng(1).random((50, 5)) < 0.7
    want = since(xr.DataArray(holds.astype(float), {"step": AT}, ("seed", "step")))
    found = first_for_good(AT, holds)
    np.testing.assert_array_equal(found, want)
    assert np.isnan(found).any() and np.isfinite(found).any()


@pytest.mark.parametrize(
    ("entered", "n"),
    [
        ([100, 500, 1500], 3),
        ([100, 120, 1500], 2),
        ([100, 121, 1500], 3),
        ([100, 119, 140], 1),  # each is near the one before
        ([1500, 100, 110], 2),
        ([np.nan, 100, np.nan], 1),
        ([np.nan] * 3, 0),
    ],
)
def test_entries_that_are_near_each_other_are_one_stage(entered, n):
    assert count_stages(np.array(entered, float)) == n


def test_how_near_is_a_parameter():
    assert count_stages(np.array([100.0, 119.0]), simultaneous=0.1) == 2
    assert count_stages(np.array([100.0, 100.0]), simultaneous=0.0) == 1


# --- dips and falls -------------------------------------------------------------------------------

NONE = Fall(np.nan, np.nan)


@pytest.mark.parametrize(
    ("curve", "want"),
    [
        ([1.0, 0.8, 0.1, 0.3, 0.5], Fall(30, np.nan)),
        (
            [1.0, 0.8, 0.1, 0.12, 0.12],
            Fall(np.nan, 30),
        ),  # a rise of 0.08 of the fall
        ([18.0, 1.0, 0.2, 0.6, 0.8], Fall(30, np.nan)),  # of 0.03 of it, not in logarithms
        ([1.0, 0.8, 0.0, 0.0, 0.0], Fall(np.nan, 30)),
        ([1.0, 0.8, 0.1, 0.2, 0.1], Fall(30, np.nan)),
        ([1.0, 0.5, 0.3, 0.1, 0.1], Fall(np.nan, 10)),
        ([1.0, 0.9, 0.8, 0.6, 0.4], NONE),  # 0.6 of its height is more than half, see below
        ([0.5, 1.0, 0.7, 0.4, 0.2], Fall(np.nan, 100)),  # from its top
        ([1.0, 1.0, 1.0, 1.0, 1.0], NONE),
        ([0.1, 0.2, 0.3, 0.4, 0.5], NONE),
        ([1.0, 0.9, 1.1, 0.8, 1.0], NONE),
        ([1.0, 0.8, np.nan, 0.3, 0.5], NONE),
        ([0.0, 0.0, 0.0, 0.0, 0.0], NONE),
    ],
)
def test_dips_and_falls(curve, want):
    if curve == [1.0, 0.9, 0.8, 0.6, 0.4]:
        assert dip_or_fall(AT, np.array(curve)) == pytest.approx(Fall(np.nan, 100), nan_ok=True)
        curve = [1.0, 0.9, 0.8, 0.6, 0.51]
    for scale in (1.0, 7.0):
        found = dip_or_fall(AT, scale * np.array(curve))
        assert found == pytest.approx(want, nan_ok=True)


def test_thresholds_of_dips_are_parameters():
    curve = np.array([1.0, 0.8, 0.1, 0.12, 0.12])
    assert dip_or_fall(AT, curve, dip_rise=0.05).dip == 30
    assert dip_or_fall(AT, curve, least_fall=0.95) == pytest.approx(NONE, nan_ok=True)


# --- change points --------------------------------------------------------------------------------


def ramp(middle: float, width: float) -> np.ndarray:
    """Return a curve over X that goes from 0 to 1."""
    return np.clip((X - middle) / width + 0.5, 0, 1)


def noise(scale: float, seed: int) -> np.ndarray:
    return scale * np.random.default_rng(seed).normal(size=len(X))


def test_nothing_changes_in_a_constant():
    assert transitions(STEPS, np.full(len(X), 3.0)) == []
    # The last digits of a mean are no curve.
    assert transitions(STEPS, 3.0 + 1e-16 * np.arange(len(X))) == []


def test_nothing_changes_in_noise_about_a_constant():
    found = [transitions(STEPS, 5.0 + noise(0.1, seed)) for seed in range(40)]
    assert found == [[]] * 40


@pytest.mark.parametrize("scale", [0.0, 0.05])
def test_a_straight_line_has_no_plateaus(scale):
    assert transitions(STEPS, X / X[-1] + noise(scale, 1)) == []


@pytest.mark.parametrize("scale", [0.0, 0.05, 0.15])
@pytest.mark.parametrize("index", [20, 60])
def test_one_change_in_a_step(index, scale):
    curve = 2.0 - 3.0 * (np.arange(len(X)) >= index)
    (found,) = transitions(STEPS, curve + noise(3 * scale, 2))
    between = np.expm1((X[index - 1] + X[index]) / 2)
    assert STEPS[index - 1] < found.step < STEPS[index]
    assert found.step == pytest.approx(between, rel=1e-6)
    assert found.low <= STEPS[index - 1] < STEPS[index] <= found.high
    assert found.change == pytest.approx(-3.0, abs=3 * scale + 1e-9)


@pytest.mark.parametrize("scale", [0.01, 0.05])
@pytest.mark.parametrize("width", [0.5, 1.5])
def test_the_middle_of_a_ramp_in_noise(width, scale):
    middle, covered = 5.0, 0
    for seed in range(20):
        (found,) = transitions(STEPS, ramp(middle, width) + noise(scale, seed))
        assert np.log1p(found.step) == pytest.approx(middle, abs=0.15)
        assert found.low <= found.step <= found.high
        assert found.change == pytest.approx(1.0, abs=0.2)
        covered += found.low <= np.expm1(middle) <= found.high
    assert covered >= 18  # 95 % on average


def test_noise_widens_the_interval():
    widths = []
    for scale in (0.005, 0.03, 0.1):
        found = [transitions(STEPS, ramp(5.0, 1.0) + noise(scale, seed))[0] for seed in range(5)]
        widths.append(np.mean([each.high - each.low for each in found]))
    assert widths[0] < widths[1] < widths[2]


def test_several_changes_in_order_and_of_either_direction():
    curve = 1.5 - ramp(3.0, 0.8) + 0.5 * ramp(5.0, 0.5) - 0.3 * ramp(6.7, 0.3)
    found = transitions(STEPS, curve + noise(0.01, 4))
    np.testing.assert_allclose(np.log1p([each.step for each in found]), [3, 5, 6.7], atol=0.08)
    np.testing.assert_allclose([each.change for each in found], [-1, 0.5, -0.3], atol=0.05)


def test_a_small_change_is_none():
    curve = ramp(3.0, 0.5) + 0.08 * ramp(6.0, 0.2)
    assert len(transitions(STEPS, curve)) == 1
    assert len(transitions(STEPS, curve, least_change=0.05)) == 2


def test_what_is_under_way_at_an_end_has_no_middle():
    """Training that is cut within a ramp: the last step is not where it is half made."""
    assert transitions(STEPS, ramp(X[-1], 1.0) + noise(0.005, 5)) == []
    assert transitions(STEPS, ramp(0.0, 1.5) + noise(0.005, 6)) == []
    # With the plateau after it, it has.
    assert len(transitions(STEPS, ramp(X[-1] - 1, 1.0) + noise(0.005, 5))) == 1


def test_scale_and_offset_and_direction_do_not_matter():
    curve = ramp(4.0, 0.7) + noise(0.02, 7)
    (one,), (other,) = transitions(STEPS, curve), transitions(STEPS, 9.0 - 1000.0 * curve)
    np.testing.assert_allclose(other[:3], one[:3], rtol=1e-6)
    assert other.change == pytest.approx(-1000 * one.change)


def test_steps_count_from_the_first():
    curve = ramp(4.0, 0.7)
    (one,), (later,) = transitions(STEPS, curve), transitions(STEPS + 5000, curve)
    np.testing.assert_allclose(later[:3], np.add(one[:3], 5000))


def test_the_interval_against_every_break_of_a_step():
    """By numpy alone: the squared residuals of two lines, for all places of one break."""
    curve = 1.0 * (X > 4.5) + noise(0.25, 8)
    (found,) = transitions(STEPS, curve)
    lines = {}
    for index in range(3, len(X) - 2):
        parts = (slice(0, index), slice(index, None))
        fits = [np.polyfit(X[part], curve[part], 1, full=True)[1].sum() for part in parts]
        lines[index] = sum(fits)
    best = min(lines, key=lines.get)
    bends = curve[1:-1] - [
        np.interp(X[i], X[[i - 1, i + 1]], curve[[i - 1, i + 1]]) for i in range(1, len(X) - 1)
    ]
    share = np.diff(X)[1:] / (np.diff(X)[1:] + np.diff(X)[:-1])
    scaled = np.abs(bends) / np.sqrt(1 + share**2 + (1 - share) ** 2)
    variance = max((np.median(scaled) / 0.6745) ** 2, lines[best] / (len(X) - 5))
    able = [i for i, cost in lines.items() if cost - lines[best] <= 3.8414588 * variance]
    assert len(able) > 1
    assert np.log1p(found.step) == pytest.approx((X[best - 1] + X[best]) / 2)
    # What the levels add is less than a distance between points.
    assert X[min(able) - 2] < np.log1p(found.low) <= X[min(able) - 1]
    assert X[max(able)] <= np.log1p(found.high) < X[min(max(able) + 1, len(X) - 1)]


def test_all_breaks_of_a_stretch_move_together():
    """By numpy alone, on a ramp between plateaus, found without the jumps where pieces meet."""
    curve, n = ramp(4.5, 1.0) + noise(0.08, 11), len(X)
    begin, end = int((X < 4.0).sum()), int((X < 5.0).sum())

    def left_over(shift: int) -> float:
        ends = [0, begin + shift, end + shift, n]
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        return sum(np.polyfit(X[p], curve[p], 1, full=True)[1].sum() for p in parts)

    allowed = 0.3
    able = [s for s in range(3 - begin, n - 2 - end) if left_over(s) - left_over(0) <= allowed]
    shifts, ends = _shifts(_costs(X, curve), [begin, end, n], begin, end - 1, allowed)
    assert shifts == (min(able), max(able)) and shifts[0] < 0 < shifts[1]
    assert ends == (begin, n - end)


def test_costs_are_those_of_ruptures():
    curve = 4.0 + ramp(4.0, 0.7) + noise(0.1, 9)
    theirs = CostLinear().fit(np.column_stack([curve, np.ones_like(X), X]))
    mine, counted = _costs(X, curve), 0
    for start, end in itertools.combinations(range(0, len(X) + 1, 5), 2):
        assert mine[start, end] == pytest.approx(theirs.error(start, end), rel=1e-7, abs=1e-10)
        counted += 1
    assert counted > 100


def test_curves_that_are_not_finite_or_short():
    curve = ramp(4.0, 0.7)
    for value in (np.nan, np.inf):
        curve[50:] = value
        with pytest.raises(InputError, match=f"{len(X) - 50} values that are not finite"):
            transitions(STEPS, curve)
    assert transitions(STEPS[:5], np.array([0.0, 0, 1, 1, 1])) == []
