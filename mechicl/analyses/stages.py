"""Stages of learning, read off curves over training: the one definition of a stage, and changes.

Plain NumPy: `mechicl.analyses.learning_stages` and `context_kl` apply these to runs.
"""

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import chdtri

from mechicl.errors import InputError

Steps = Float[np.ndarray, " step"]

RISE = 0.25
"""Attention that a head adds on a block when it enters it (yuksel2026, Fig. 2)."""

_SHORTEST = 3  # points of a piece: two make a line through whatever they are
_PENALTY = 5.0  # over the 3 of BIC for level, slope and place: a break in noise is 1 curve in 100
_FINEST = 0.005  # of the range of a curve: what is smaller is not followed, noise or not
_CONFIDENCE = 0.95


def stage_entries(
    steps: Steps,
    mass: Float[np.ndarray, "step head block"],
    kl: Float[np.ndarray, "step block"],
    without: Float[np.ndarray, "block block"],
    *,
    rise: float = RISE,
) -> Float[np.ndarray, " block"]:
    """Return the step at which a model enters each block: the definition of a stage.

    Block j is entered at the first step from which, to the last one, the mass of one and the same
    head on block j is above its mass there at the first step + `rise`, provided that the model
    comes to use what it sees: that, at some step, its divergence from a reference that has block j
    has fallen below half of what the blocks before j leave,

        KL(blocks_i ‖ model) < ½ KL(blocks_i ‖ blocks_{j−1})    for one i ≥ j at least,

    and below its value at the first step. That is the bottom of its dip, where the curve rises
    again, or of its fall, where it does not. blocks_i is the generator with the terms of blocks 1
    to i alone, blocks_0 the uniform law. Where blocks are entered in their order i = j decides; a
    run that enters a later block first never comes near blocks_j, and shows by i > j that it has j.

    Parameters
    ----------
    steps
        (step,), increasing.
    mass
        Attention of each head on each block, (step, head, block), from 0.
    kl
        KL(blocks_i ‖ model), (step, block), nat.
    without
        KL(blocks_i ‖ blocks_{j−1}), (block i, block j), nat; only i ≥ j is read.
    rise
        Mass to be added.

    Returns
    -------
    np.ndarray
        (block,), in steps; NaN for a block that is not entered, and for all where a mass or a
        divergence is NaN.

    Raises
    ------
    InputError
        Shapes that do not fit.

    Notes
    -----
    Source: yuksel2026 section 2.2, Figs. 2 and 3, which show stages and do not define them.
    """
    steps, mass, kl, without = (np.asarray(each, float) for each in (steps, mass, kl, without))
    n_blocks = kl.shape[-1]
    expected = ((len(steps), *mass.shape[1:2], n_blocks), (len(steps), n_blocks))
    if (mass.shape, kl.shape) != expected or without.shape != (n_blocks, n_blocks):
        raise InputError(
            f"steps {steps.shape}, mass {mass.shape}, kl {kl.shape}, without {without.shape}; "
            "accepted: (step,), (step, head, block), (step, block), (block, block)"
        )
    if np.isnan(mass).any() or np.isnan(kl).any():
        return np.full(n_blocks, np.nan)
    held = first_for_good(steps, np.moveaxis(mass > mass[0] + rise, 0, -1))
    entered = np.fmin.reduce(held, axis=0)  # the first head, NaN where there is none
    reached = kl.min(0)
    comes_near = (reached[:, None] < without / 2) & (reached < kl[0])[:, None]
    return np.where(np.tril(comes_near).any(0), entered, np.nan)


def first_for_good(
    steps: Steps, holds: Bool[np.ndarray, "*kept step"]
) -> Float[np.ndarray, "*kept"]:
    """Return the first step from which `holds` is true to the last; NaN where it is not there."""
    length = np.cumprod(holds[..., ::-1], axis=-1).sum(-1)
    return np.where(length > 0, np.append(steps[::-1], np.nan)[length - 1], np.nan)


def count_stages(entered: Float[np.ndarray, " block"], *, simultaneous: float = 0.2) -> int:
    """Return how many stages these entries make: those close to the one before are of its stage.

    Two that follow each other are one stage where the later is at most (1 + `simultaneous`) times
    the earlier. NaN is no entry.
    """
    times = np.sort(entered[np.isfinite(entered)])
    return int(times.size > 0) + int((times[1:] > (1 + simultaneous) * times[:-1]).sum())


class Fall(NamedTuple):
    """Where a curve has its dip, or else its fall, in steps; NaN for what it has not."""

    dip: float
    fall: float


def dip_or_fall(
    steps: Steps,
    curve: Float[np.ndarray, " step"],
    *,
    dip_rise: float = 0.1,
    least_fall: float = 0.5,
) -> Fall:
    """Return the bottom of a curve that rises again, or the half of its fall if it does not.

    With k_min the least value, at its first step, k_max the largest up to there and after it the
    largest k_later: the curve falls where k_max − k_min > `least_fall` · k_max. A fall is a dip
    where log(k_later/k_min) > `dip_rise` · log(k_max/k_min): `dip` is the step of k_min. Otherwise
    `fall` is the first step, from that of k_max on, at which half of k_max − k_min is made. Dips
    are judged in logarithms, for an untrained model may be a hundred times as far from a reference
    as two references are from each other; a least value below 1e-12 · k_max counts as that.

    Parameters
    ----------
    steps, curve
        (step,): at what steps, and a curve from 0, such as a divergence.
    dip_rise
        Least rise after the minimum, as a part of the fall before it, both in logarithms.
    least_fall
        Least fall, as a part of the height that it starts from; noise on a curve that stays makes
        small ones.

    Returns
    -------
    Fall
        `dip` or `fall`, the other NaN. Both NaN for a curve that does not fall, or has a NaN.
    """
    curve = np.asarray(curve, float)
    if np.isnan(curve).any():
        return Fall(np.nan, np.nan)
    bottom = int(curve.argmin())
    top = int(curve[: bottom + 1].argmax())
    fall = curve[top] - curve[bottom]
    if not fall > least_fall * curve[top]:
        return Fall(np.nan, np.nan)
    least, later = max(curve[bottom], 1e-12 * curve[top]), curve[bottom:].max()
    if later > least and np.log(later / least) > dip_rise * np.log(curve[top] / least):
        return Fall(float(steps[bottom]), np.nan)
    half = top + int((curve[top:] <= curve[top] - fall / 2).argmax())
    return Fall(np.nan, float(steps[half]))


class Transition(NamedTuple):
    """A change from one plateau of a curve to another.

    Attributes
    ----------
    step
        Where half of it is made.
    low, high
        Ends of the steps at which, by the data, it may be.
    change
        From plateau to plateau: negative for a fall.
    """

    step: float
    low: float
    high: float
    change: float


def transitions(
    steps: Steps, curve: Float[np.ndarray, " step"], *, least_change: float = 0.1
) -> list[Transition]:
    """Find the changes of a curve between plateaus, each with its step and how sure that is.

    Over x = log(1 + steps since the first), the curve is cut into straight pieces, as many as pay
    for themselves: `ruptures.Pelt`, an exact search, with squared residuals of a line in each piece
    as the cost and 5 σ² log n as the price of a break. σ is the noise by the median of second
    differences, and at least 0.5 % of the range of the curve.

    What moves faster than an even change over all of training would is a transition. Two stretches
    of one direction, with no plateau of three points at least between them, are one; so are two of
    opposite directions, where one is less than a third of the other. Transitions that change the
    fit by less than `least_change` of its range are none, nor are those under way at the first or
    the last step: where they lead, and so where they are half made, is not known.

    `low` and `high`: all breaks of a transition are moved together along the points; the places
    whose squared residuals are within 3.84 σ² of the best, the 95 % point of chi-square of one
    degree of freedom, are where it may be. Half a distance between points is added on either side,
    and 1.96 standard errors of the height of half the way, over the slope. On ramps in independent
    noise of up to a tenth of their height the truth is in between in 95 of 100.

    Noise counts as independent from point to point: then one constant curve in a hundred has a
    transition. Where it wanders, as losses late in training do, only `least_change` keeps it out,
    so that a curve that does nothing else may have some.

    Parameters
    ----------
    steps, curve
        (step,): increasing steps, and the curve there.
    least_change
        Least transition, as a part of the range of the fitted curve.

    Returns
    -------
    list of Transition
        In the order of steps; empty where there is none, as in a constant, in noise about one, in
        a straight line, and in fewer than 6 points.

    Raises
    ------
    InputError
        A curve that is not finite: it has no plateaus.
    """
    steps, curve = np.asarray(steps, float), np.asarray(curve, float)
    if not np.isfinite(curve).all():
        raise InputError(
            f"the curve has {(~np.isfinite(curve)).sum()} values that are not finite; accepted: "
            "finite ones; leave out a run that diverged"
        )
    if len(curve) < 2 * _SHORTEST or np.ptp(curve) <= 1e-12 * np.abs(curve).max():
        return []
    x = np.log1p(steps - steps[0])
    # A curve is as large as its range here: rounding must not look like a piece.
    costs, breaks, variance = _pieces(x, (curve - curve.mean()) / np.ptp(curve))
    fit = _fitted(x, curve, breaks)
    allowed = chdtri(1, 1 - _CONFIDENCE) * variance
    found = []
    for first, last in _moves(x, fit, least_change):
        if first == 0 or last == len(x) - 1:
            continue
        change = float(fit[last] - fit[first])
        at = _half(fit[first : last + 1]) + first
        (early, late), ends = _shifts(costs, breaks, first, last, allowed)
        where = np.interp([at, at + early - 0.5, at + late + 0.5], np.arange(len(x)), x)
        # Of the level in the middle, and of the levels of the ends of the plateaus, in x.
        level = 1 / (last - first + 1) + 1 / ends[0] + 1 / ends[1]
        slope = np.ptp(fit[[first, last]]) / np.ptp(curve) / (x[last] - x[first])
        where[1:] += np.sqrt(allowed * level) / slope * np.array([-1, 1])
        low, high = np.clip(where[1:], x[0], x[-1])
        at, low, high = (float(steps[0] + np.expm1(each)) for each in (where[0], low, high))
        found.append(Transition(at, low, high, change))
    return found


def _pieces(x: np.ndarray, curve: np.ndarray) -> tuple[np.ndarray, list[int], float]:
    """Return the costs of pieces, the breaks between the best ones, and the variance of noise.

    Breaks are indices of first points of pieces, with the number of points as the last.
    """
    from ruptures import Pelt  # takes a second

    left, right = np.diff(x)[:-1], np.diff(x)[1:]
    share = right / (left + right)
    bends = curve[1:-1] - share * curve[:-2] - (1 - share) * curve[2:]
    sizes = np.abs(bends) / np.sqrt(1 + share**2 + (1 - share) ** 2)
    noise = max(float(np.median(sizes)) / 0.6745, _FINEST)
    costs = _costs(x, curve)
    search = Pelt(custom_cost=_table_cost()(costs), min_size=_SHORTEST, jump=1).fit(curve)
    breaks = search.predict(pen=_PENALTY * noise**2 * np.log(len(x)))
    left_over = _total(costs, [0, *breaks]) / max(len(x) - 3 * len(breaks) + 1, 1)
    return costs, breaks, max(noise**2, left_over)


@cache
def _table_cost() -> type:
    """Return a cost of ruptures that looks pieces up: its own `CostLinear` solves each anew."""
    from ruptures.base import BaseCost

    class TableCost(BaseCost):
        min_size = _SHORTEST

        @property
        def model(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            """What ruptures knows it by."""
            return "table"

        def __init__(self, table: np.ndarray) -> None:
            self.table = table

        def fit(self, signal: np.ndarray) -> "TableCost":  # pyright: ignore[reportIncompatibleMethodOverride]
            """Take the signal, of which ruptures reads the length."""
            self.signal = signal
            return self

        def error(self, start: int, end: int) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
            """Return the cost of points `start` to `end` − 1."""
            return self.table[start, end]

    return TableCost


def _costs(
    x: Float[np.ndarray, " step"], curve: Float[np.ndarray, " step"]
) -> Float[np.ndarray, "start end"]:
    """Return the squared residuals of the line through points `start` to `end` − 1, all pairs."""
    x, y = x - x.mean(), curve - curve.mean()
    terms = np.stack([np.ones_like(x), x, x * x, y, x * y, y * y])
    sums = np.pad(terms.cumsum(1), ((0, 0), (1, 0)))
    n, x1, x2, y1, xy, y2 = sums[:, None, :] - sums[:, :, None]
    n = np.maximum(n, 1)
    spread = x2 - x1 * x1 / n
    # Pieces of one point have no slope, and no residual.
    slope = (xy - x1 * y1 / n) / np.where(spread > 0, spread, np.inf)
    return np.maximum(y2 - y1 * y1 / n - slope**2 * spread, 0.0)


def _total(costs: np.ndarray, ends: list[int]) -> float:
    return float(sum(costs[start, end] for start, end in pairwise(ends)))


def _fitted(x: np.ndarray, curve: np.ndarray, breaks: list[int]) -> np.ndarray:
    return np.concatenate(
        [np.polyval(np.polyfit(x[a:b], curve[a:b], 1), x[a:b]) for a, b in pairwise([0, *breaks])]
    )


def _moves(x: np.ndarray, fit: np.ndarray, least_change: float) -> list[tuple[int, int]]:
    """Return the first and last point of each stretch that moves faster than evenly."""
    reach = np.ptp(fit)
    fast = np.abs(np.diff(fit)) * (x[-1] - x[0]) > 1.001 * reach * np.diff(x)
    ways = np.where(fast, np.sign(np.diff(fit)), 0)
    edges = np.flatnonzero(np.diff(ways)) + 1
    stretches = [
        (int(a), int(b)) for a, b in zip([0, *edges], [*edges, len(ways)], strict=True) if ways[a]
    ]
    merged: list[tuple[int, int]] = []
    for first, last in stretches:
        # Where pieces meet, the fit may jump back a little.
        if merged and first - merged[-1][1] < _SHORTEST:
            before, now = fit[merged[-1][1]] - fit[merged[-1][0]], fit[last] - fit[first]
            if before * now > 0 or min(abs(before), abs(now)) < max(abs(before), abs(now)) / 3:
                merged[-1] = (merged[-1][0], last)
                continue
        merged.append((first, last))
    return [(a, b) for a, b in merged if abs(fit[b] - fit[a]) >= least_change * reach]


def _half(fit: np.ndarray) -> float:
    """Return where, as an index with a fraction, half of the way from first to last is made."""
    way = (fit - fit[0]) / (fit[-1] - fit[0])
    after = int((way >= 0.5).argmax())
    return after - (way[after] - 0.5) / (way[after] - way[after - 1])


def _shifts(
    costs: np.ndarray, breaks: list[int], first: int, last: int, allowed: float
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how far the breaks of a stretch may move together, and the points on either side."""
    moved = [each for each in breaks[:-1] if first <= each <= last + 1]
    before = max([0, *(each for each in breaks if each < moved[0])])
    after = min(each for each in breaks if each > moved[-1])

    def total(shift: int) -> float:
        return _total(costs, [before, *(each + shift for each in moved), after])

    shifts = range(before + _SHORTEST - moved[0], after - _SHORTEST - moved[-1] + 1)
    best = total(0)
    able = [shift for shift in shifts if total(shift) - best <= allowed]
    return (min(able), max(able)), (moved[0] - before, after - moved[-1])
