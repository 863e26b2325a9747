"""Figures of the probes of heads and blocks: what is drawn are the results."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from mechicl import analyses, plots
from mechicl.plots import style
from tests.analyses import markov_toy


def result_of(name: str, n_seeds: int = 2, poisoned: bool = False) -> xr.Dataset:
    toy, record = markov_toy.learning(n_seeds), analyses.get(name)
    trajectory = toy.trajectory
    if poisoned:
        trajectory = markov_toy.poison(trajectory, seed=1, from_index=4)
    return record(trajectory, toy.forward() if record.forward else None)


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def layers(result: xr.Dataset) -> xr.Dataset:
    """Return a result as one of two layers."""
    how = {"data_vars": "minimal", "coords": "minimal", "compat": "override"}
    return xr.concat([result, result], "layer", combine_attrs="override", **how)


def test_means_and_strips_of_attention():
    result = result_of("attention_spans", poisoned=True)
    figure = plots.draw(result)
    places, strips = figure.axes[:3], figure.axes[3:]
    for place, block in np.ndindex(3, 3):
        line = places[place].lines[block]
        want = result["mean_mass"].isel(layer=0, place=place, block=block)
        np.testing.assert_array_equal(line.get_ydata(), want)
        assert line.get_color() == style.colour(block)
    meshes = [mesh for axes in strips for mesh in axes.collections if isinstance(mesh, QuadMesh)]
    first, second = (mesh.get_array() for mesh in meshes)
    np.testing.assert_array_equal(first.data[1], [0, 0, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(first.data[2], [0, 0, 1, 1, 1, 0, 3])
    assert not first.mask.any()
    assert second.mask[:, 4:].all() and not second.mask[:, :4].any()
    assert {"mass on block 3", "serves block 1", "serves none", "undefined"} <= set(labels(figure))
    assert "mean of the 1 of 2 seeds" in figure.get_suptitle().replace("\n", " ")


def test_a_run_whose_heads_tie_says_so():
    toy = markov_toy.learning(2)
    toy.trajectory["KQ"].values[:, -1] = 0.0
    figure = plots.draw(analyses.get("attention_spans")(toy.trajectory, toy.forward()))
    for axes in figure.axes[:3]:
        assert [text.get_text() for text in axes.texts] == ["undefined"]
    assert "mean of the 0 of 2 seeds" in figure.get_suptitle().replace("\n", " ")


def test_cosines_and_total_projections():
    result = result_of("value_alignment")
    figure = plots.draw(result)
    assert len(figure.axes) == 2 * 4
    for seed, head, block in np.ndindex(2, 3, 3):
        line = figure.axes[4 * seed + head].lines[block]
        want = result["cosine"].isel(seed=seed, layer=0, head=head, block=block)
        np.testing.assert_array_equal(line.get_ydata(), want)
    total = figure.axes[7]
    want = result["total_projection"].isel(seed=1, layer=0, block=2)
    np.testing.assert_array_equal(total.lines[2].get_ydata(), want)
    assert {"A*1", "A*2", "A*3", "learnt"} == set(labels(figure))


def test_heads_are_drawn_in_their_order():
    result = result_of("head_permutation", poisoned=True)
    first, second = plots.draw(result).axes[:2]
    np.testing.assert_allclose(np.diag(first.images[0].get_array()), 0.9, atol=1e-6)
    assert first.get_title() == "margin 1.7"
    assert [text.get_text() for text in second.texts] == ["undefined"]
    assert second.get_title() == ""
    turned = plots.draw(result_of("head_permutation")).axes[1]
    np.testing.assert_allclose(np.diag(turned.images[0].get_array()), 0.9, atol=1e-6)
    assert [tick.get_text() for tick in turned.get_yticklabels()] == ["1", "2", "0"]


@pytest.mark.parametrize("name", ["attention_spans", "value_alignment", "head_permutation"])
def test_layers_have_panels_of_their_own(name, tmp_path):
    figure = plots.draw(layers(result_of(name)))
    figure.savefig(tmp_path / "figure.png", dpi=30)
    said = " ".join(axes.get_title() + axes.get_ylabel() for axes in figure.axes)
    assert "layer 0" in said and "layer 1" in said
    if name == "attention_spans":
        ticks = [tick.get_text() for tick in figure.axes[-1].get_yticklabels()]
        assert ticks == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
