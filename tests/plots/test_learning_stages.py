"""Figures of the probes of how the Markov chain is learnt: what is drawn are the results."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from mechicl import analyses, plots
from mechicl.schema import flag_names
from tests.analyses import markov_toy


def result_of(name: str, poisoned: bool = False, **settings: object) -> xr.Dataset:
    toy = markov_toy.learning(2)
    trajectory = toy.trajectory
    if poisoned:
        trajectory = markov_toy.poison(trajectory, seed=1, from_index=0)
    return analyses.get(name)(trajectory, toy.forward(), n_prompts=50, **settings)


def labels(figure: Figure) -> set[str]:
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def test_a_panel_a_reference_with_its_dip():
    result = result_of("context_kl", conditional=(6,))
    figure = plots.draw(result)
    names = list(flag_names(result["reference"]).values())
    assert names == [axes.get_title() for axes in figure.axes[:4]]
    assert names[-1] == "KL(conditional_6||model)"
    marked = 0
    for number, axes in enumerate(figure.axes[:4]):
        one = result.isel(reference=number)
        curves = [line for line in axes.lines if len(line.get_xdata()) == result.sizes["step"]]
        np.testing.assert_allclose(curves[0].get_ydata(), one["kl"][0])
        points = {
            (line.get_marker(), float(line.get_xdata()[0]))
            for line in axes.lines
            if len(line.get_xdata()) == 1
        }
        want = {("v", float(step)) for step in one["dip"].values if np.isfinite(step)}
        want |= {("d", float(step)) for step in one["fall"].values if np.isfinite(step)}
        assert points == want
        marked += len(want)
    assert marked >= 4
    excess = figure.axes[4]
    assert "entropy" in excess.get_title()
    assert {"seed 0", "seed 1", "dip", "half of the fall"} <= labels(figure)
    assert "50 prompts" in figure.get_suptitle().replace("\n", " ")


def test_a_dip_at_a_step_that_is_not_shown_has_no_mark():
    result = result_of("context_kl").isel(step=[0, -1])
    axes = plots.draw(result).axes[0]
    assert [line for line in axes.lines if len(line.get_xdata()) == 1] == []


def test_bars_from_the_entry_to_the_end():
    result = result_of("learning_stages")
    figure = plots.draw(result)
    timeline, loss, overlap = figure.axes[:3]
    bars = sorted((patch.get_x(), patch.get_width()) for patch in timeline.patches)
    assert bars == sorted([(100, 1400), (700, 800), (1500, 0)] * 2)
    spans = [tuple(line.get_xdata()) for line in timeline.lines]
    assert spans.count((100, 400)) == 2  # heads compete
    assert spans.count((50, 100)) == spans.count((400, 700)) == spans.count((1250, 1500)) == 2
    np.testing.assert_array_equal(loss.lines[0].get_ydata(), result["loss"][0])
    np.testing.assert_array_equal(overlap.lines[1].get_ydata(), result["overlap"][1])
    for block, axes in enumerate(figure.axes[3:6]):
        assert axes.get_ylabel() == f"largest mass on block {block + 1}"
        want = result["mass"][0, :, 0, :, block].max("head")
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), want)
    assert {"block 3 entered", "heads compete", "compete from 0.5"} <= labels(figure)
    assert "2 of 2 seeds" in figure.get_suptitle()


def test_heads_that_never_part_compete_to_the_end():
    """`competitive_until` is NaN then, and the phase is not over."""
    result = result_of("learning_stages")
    last = result["step"].values[-1]
    compete = xr.where(result["step"] < 100, 0.0, 1.0)
    for phase, wanted in ((compete, (100, last)), (0 * compete, None)):
        alike = result.assign(
            phase=result["phase"].copy(data=phase.broadcast_like(result["phase"]).values),
            competitive_until=result["competitive_until"] * np.nan,
        )
        figure = plots.draw(alike)
        black = [line for line in figure.axes[0].lines if line.get_color() == "black"]
        spans = [tuple(line.get_xdata()) for line in black]
        assert spans == ([] if wanted is None else [wanted] * 2)
        assert ("heads compete" in labels(figure)) == (wanted is not None)


def test_a_seed_without_stages_has_no_bars():
    result = result_of("learning_stages", poisoned=True)
    figure = plots.draw(result)
    assert len(figure.axes[0].patches) == 3
    assert "undefined: seed 1 (nonfinite parameters)" in figure.axes[1].get_title(loc="left")
    figure = plots.draw(result.isel(seed=[1]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["no block is entered for good"]
    assert [text.get_text() for text in figure.axes[1].texts] == ["undefined"]
