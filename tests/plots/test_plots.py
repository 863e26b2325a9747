import ast
import importlib
import subprocess
import sys
from itertools import pairwise

import matplotlib.figure
import matplotlib.lines
import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import QuadMesh

from mechicl import analyses, plots
from mechicl.analyses.probe import since
from mechicl.plots import generic, style
from tests import trajectories
from tests.analyses.toy import CHEAP, forward_for, suited


def result_of(name: str, n_seeds: int = 2) -> xr.Dataset:
    record = analyses.get(name)
    trajectory = trajectories.learning(n_seeds, 8, 2)
    trajectory = suited(name, trajectory)
    return record(trajectory, forward_for(name), **CHEAP.get(name, {}))


def title_text(figure: matplotlib.figure.Figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


def labels(figure: matplotlib.figure.Figure) -> set[str]:
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def test_every_own_figure_is_a_module_named_as_its_probe():
    assert set(plots.OWN) <= set(analyses.names())
    for name in plots.OWN:
        assert callable(importlib.import_module(f"mechicl.plots.{name}").draw)


ALONG = {
    "head_permutation": "block",
    "key_patching": "first layer with the donor's keys, ℓ₀",
    "length_generalization": "examples in a context, L′",
    "loss_landscape": "KQ scale ω",
    "routing": "depth of the node",
}
"""What is on x where it is not the training step."""


@pytest.mark.parametrize("name", [name for name in plots.OWN if name != "circuits"])
def test_axes_are_labelled_and_seeds_are_named(name, tmp_path):
    figure = plots.draw(result_of(name))
    figure.savefig(tmp_path / "figure.png", dpi=30)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    along = ALONG.get(name, "training step")
    assert any(axes.get_xlabel() == along for axes in figure.axes)
    rows = figure.axes[:1] if name == "sign_matching" else []  # a row says which seed it is
    assert all(axes.get_ylabel() for axes in figure.axes if axes not in rows)
    named = labels(figure) | {axes.get_ylabel() for axes in figure.axes}
    named |= {axes.get_title() for axes in figure.axes}
    named |= {tick.get_text() for axes in figure.axes for tick in axes.get_yticklabels()}
    for seed in (0, 1):
        assert any(f"seed {seed}" in text for text in named)


def test_circuits_show_their_numbers_in_one_symmetric_scale():
    result = result_of("circuits")
    figure = plots.draw(result)
    kq = [axes for axes in figure.axes if axes.get_title().startswith("KQ")]
    ov = [axes for axes in figure.axes if axes.get_title().startswith("OV")]
    assert len(kq) == len(ov) == 4
    for panels in (kq, ov):
        limits = {image.get_clim() for axes in panels for image in axes.images}
        assert len(limits) == 1
        low, high = limits.pop()
        assert low == -high < 0
    shown = result["KQ"].isel(step=-1, layer=0)
    np.testing.assert_array_equal(kq[0].images[0].get_array(), shown.isel(seed=0, head=0))
    np.testing.assert_array_equal(kq[3].images[0].get_array(), shown.isel(seed=1, head=1))
    last_row = result["OV"].isel(step=-1, layer=0, seed=0, head=1, d_out=-1)
    np.testing.assert_array_equal(ov[1].images[0].get_array()[:, 0], last_row)
    first = importlib.import_module("mechicl.plots.circuits").draw(result, step=0)
    assert "step 0" in first.get_suptitle()


def test_the_curve_of_the_manifold_and_the_paths_are_the_results():
    result = result_of("solution_manifold")
    figure = plots.draw(result)
    size, distance, plane = figure.axes
    np.testing.assert_array_equal(size.lines[0].get_ydata(), result["eta"].values[0])
    np.testing.assert_array_equal(distance.lines[1].get_ydata(), result["distance"].values[1])
    np.testing.assert_array_equal(plane.lines[0].get_xdata(), result["gamma"].values[0])
    np.testing.assert_array_equal(plane.lines[0].get_ydata(), result["mu_gamma"].values[0])
    assert {"seed 0", "seed 1", "μ_γ of (4.6) at γ̂"} <= labels(figure)
    assert plane.get_ylabel() == "Σ|μ| / 2"
    assert any(text.startswith("η* = 0.8791") for text in labels(figure))


def test_the_figure_of_a_claim_says_which_of_several_runs_it_is():
    result = result_of("sign_matching")
    assert title_text(plots.draw(result)).startswith("on every live head")
    named = plots.draw(result.assign_attrs(run_label="H=2"))
    assert title_text(named).startswith("H=2: on every live head")


@pytest.mark.parametrize("span", [(0.0125, 0.1), (1.0, 7.0), (0.01, 10.0), (1e-7, 1.0)])
def test_labels_of_logarithmic_axes_have_room(span):
    x = np.geomspace(*span, 5)
    figure = plots.draw(
        xr.Dataset(
            {"y": (("curve", "x"), x[None])},
            coords={"curve": ["a"], "x": x},
            attrs={"figure": "curves", "title": "t", "x_label": "x", "y_label": "y"}
            | {"x_scale": "log", "y_scale": "log"},
        )
    )
    [axes] = figure.axes
    figure.draw_without_rendering()
    labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    (low, high), shown = axes.get_xlim(), []
    for label in labels:
        if label.get_text() and low <= label.get_position()[0] <= high:
            shown.append(label.get_window_extent())
    assert len(shown) >= 2
    shown.sort(key=lambda box: box.x0)
    assert all(one.x1 < other.x0 for one, other in pairwise(shown))


def test_labels_beside_the_colours_of_a_difference_have_room():
    figure = plots.draw(result_of("loss_landscape"))
    figure.draw_without_rendering()
    bar = next(axes for axes in figure.axes if axes.get_ylabel() == "mean squared error")
    low, high = bar.get_ylim()
    shown = [
        label.get_window_extent()
        for label in bar.get_yticklabels()
        if label.get_text() and low <= label.get_position()[1] <= high
    ]
    shown.sort(key=lambda box: box.y0)
    assert len(shown) >= 3
    assert all(one.y1 < other.y0 for one, other in pairwise(shown))


def stuck() -> xr.Dataset:
    """Return where three models stand: seed 0 gets there, 1 has one sign, 2 has NaN in the end."""
    gamma, mu = 0.18, 2.44
    both = [[0.1, -0.1], [gamma, -gamma], [gamma, -gamma]]
    omega = np.array([both, [[0.1, 0.1], [0.5, 0.5], [0.5, 0.5]], both])
    ov = np.sign(omega) * np.array([0.1, mu, mu])[None, :, None]
    ov[1, 1:] = 0.4
    trajectory = trajectories.from_scales(omega, ov, steps=[0, 10, 500])
    return analyses.get("solution_manifold")(trajectories.poison(trajectory, seed=2, from_index=2))


def test_seeds_without_a_distance_are_named_with_the_reason():
    size, distance, _ = plots.draw(stuck()).axes
    assert distance.get_title(loc="left") == "undefined: seed 1 (one sign only)"
    assert size.get_title(loc="left") == ""


def test_paths_that_do_not_end_on_the_manifold_look_otherwise():
    result = stuck()
    figure = plots.draw(result)
    plane = figure.axes[2]
    colours = [style.colour(seed) for seed in range(3)]
    ends = {
        line.get_color(): line.get_marker() for line in plane.lines if line.get_marker() in "sx"
    }
    assert [ends[colour] for colour in colours] == ["s", "x", "x"]
    paths = {line.get_color(): line.get_alpha() for line in plane.lines if line.get_alpha()}
    assert paths[colours[0]] == 1.0
    assert paths[colours[1]] == paths[colours[2]] < 1.0
    meanings = {"start", "end, yes at last step", "end, not yes at last step"}
    assert meanings <= labels(figure)
    only_yes = labels(plots.draw(result.isel(seed=[0])))
    assert meanings - only_yes == {"end, not yes at last step"}


def test_the_curve_is_no_line_through_a_few_points():
    def curve(n_steps: int) -> matplotlib.lines.Line2D:
        trajectory = trajectories.learning(2, n_steps, 2)
        plane = plots.draw(analyses.get("solution_manifold")(trajectory)).axes[2]
        return next(line for line in plane.lines if line.get_label().startswith("μ_γ"))

    assert (curve(4).get_linestyle(), curve(4).get_marker()) == ("None", "+")
    assert curve(20).get_linestyle() != "None"


def test_step_zero_is_on_the_axis():
    for name in ("sign_matching", "zero_sum_ov", "head_roles"):
        axes = plots.draw(result_of(name)).axes[-1 if name == "head_roles" else 0]
        assert axes.get_xscale() == "symlog"
        left, right = axes.get_xlim()
        assert left <= 0 < 10_000 <= right


def test_references_are_named_and_differ_in_colour_and_marker():
    result = result_of("approximate_loss")
    figure = plots.draw(result)
    drawn = [line for line in figure.axes[0].lines if line.get_label().startswith(("zero", "van"))]
    assert [line.get_label() for line in drawn] == [
        f"zero, {float(result['reference_loss'][0]):.3f}",
        f"vanilla_gd, {float(result['reference_loss'][1]):.3f}",
    ]
    assert {line.get_label() for line in drawn} <= labels(figure)
    for look in ("get_color", "get_marker"):
        assert len({getattr(line, look)() for line in drawn}) == 2
    assert {line.get_color() for line in drawn}.isdisjoint(style.PALETTE)
    places = [line.get_xdata()[line.get_markevery()[0]] for line in drawn]
    assert abs(places[0] - places[1]) > 0.05


def test_the_title_of_the_loss_says_on_how_many_prompts():
    result = result_of("approximate_loss")
    assert "on 300 prompts" in plots.draw(result).get_suptitle()
    del result.attrs["parameters"]
    assert "prompts" not in plots.draw(result).get_suptitle()


def test_every_seed_has_a_row_of_its_signs():
    result = result_of("sign_matching", 3)
    result["sign_agreement"].values[:] = 1.0
    result["sign_agreement"].values[1, -3:] = np.nan
    figure = plots.draw(result)
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["seed 0", "seed 1", "seed 2"]
    (mesh,) = (item for item in axes.collections if isinstance(item, QuadMesh))
    shown = mesh.get_array()
    assert shown.shape == (3, 8)
    assert shown.mask.sum() == shown.mask[1, -3:].sum() == 3
    assert mesh.get_clim() == (0, 1)
    assert labels(figure) == {"undefined"}


def test_titles_have_greek_letters():
    assert style.greek("omega and mu, |mu|, mu_gamma, eta_star") == "ω and μ, |μ|, μ_γ, η*"
    assert style.greek("beta, multi-head, theta") == "beta, multi-head, theta"
    assert "ω and μ" in plots.draw(result_of("sign_matching")).get_suptitle().replace("\n", " ")
    titles = [axes.get_title() for axes in generic.draw(result_of("solution_manifold")).axes]
    assert not any("omega" in title or "eta_" in title for title in titles)
    assert any("|ω|" in title for title in titles)


def test_one_step_fills_the_strip():
    for name in ("head_roles", "sign_matching"):
        result = result_of(name).isel(step=[-1])
        axes = plots.draw(result).axes[0]
        (mesh,) = (item for item in axes.collections if isinstance(item, QuadMesh))
        edges = mesh.get_coordinates()[0, :, 0]
        assert tuple(edges) == axes.get_xlim() == (9999.5, 10000.5)
        assert list(axes.get_xticks()) == [10_000]


def test_seeds_without_values_are_grouped_by_reason():
    values = xr.DataArray(np.full((12, 2), np.nan), dims=("seed", "step"))
    values = values.assign_coords(seed=np.arange(12))
    codes = xr.zeros_like(values, dtype=int)
    codes.attrs = {"flag_values": [0, 1, 2], "flag_meanings": "defined no_head too_big"}
    codes[0], codes[1, 0], codes[1, 1], codes[2:] = 1, 1, 2, 2
    assert style.absent(values, codes) == (
        "undefined: seed 0 (no head); seed 1 (no head, too big); 10 seeds (too big)"
    )
    assert style.absent(values[:2], None) == "undefined: seeds 0, 1 (no reason given)"
    values[:, 0] = 1.0
    assert style.absent(values, codes) == ""


def test_a_value_alone_among_undefined_ones_has_a_marker():
    values = xr.DataArray(np.arange(20.0)[None], dims=("seed", "step"))
    values = values.assign_coords(seed=[0], step=np.arange(20))
    values[0, [3, 5]] = np.nan
    axes = matplotlib.figure.Figure().subplots()
    style.lines(axes, values)
    assert axes.lines[0].get_markevery() == [4]


def tiled(name: str, n_seeds: int) -> xr.Dataset:
    result = result_of(name, 4)
    parts = [result.isel(seed=[seed % 4]) for seed in range(n_seeds)]
    out = xr.concat(parts, "seed", data_vars="minimal", combine_attrs="override")
    return out.assign_coords(seed=np.arange(n_seeds))


def blank(name: str) -> xr.Dataset:
    result = result_of(name)
    for variable in result.data_vars.values():
        if "seed" in variable.dims and variable.dtype.kind == "f":
            variable.values[...] = np.nan
    return result


CASES = {
    "one seed": lambda name: tiled(name, 1),
    "sixteen seeds": lambda name: tiled(name, 16),
    "one step": lambda name: tiled(name, 4).isel(step=[-1]),
    "nothing defined": blank,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*plots.OWN, "generic"])
def test_legend_and_title_fit_and_cover_nothing(name, case):
    result = CASES[case]("solution_manifold" if name == "generic" else name)
    figure = (generic if name == "generic" else plots).draw(result)
    figure.set_dpi(50)
    figure.draw_without_rendering()
    page = figure.bbox.padded(1)
    legends = [legend.get_window_extent() for legend in figure.legends]
    title = figure._suptitle.get_window_extent()
    panels = [axes.get_tightbbox() for axes in figure.axes if axes.axison]
    for box in [*legends, title, *panels]:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
    for number, box in enumerate(panels):
        assert not any(box.overlaps(other) for other in [*legends, title, *panels[:number]])
    assert not any(title.overlaps(box) for box in legends)
    if case == "nothing defined" and name == "loss_landscape":  # it is there without a model
        assert "undefined: seeds 0, 1" in title_text(figure)
    elif case == "nothing defined":
        assert any(text.get_text() == "undefined" for axes in figure.axes for text in axes.texts)


@pytest.mark.parametrize("n_heads", [1, 2, 4])
def test_the_longest_scales_fit_beside_circuits(n_heads):
    one = result_of("circuits").isel(head=[0])
    result = xr.concat([one] * n_heads, "head", data_vars="minimal")
    for name in ("omega", "mu"):
        result[name] = xr.full_like(result[name], -1.23e-5)
    figure = plots.draw(result)
    figure.draw_without_rendering()
    page, titles = figure.bbox, [axes.title.get_window_extent() for axes in figure.axes]
    for box in titles:
        assert page.x0 <= box.x0 and box.x1 <= page.x1
    above = [box for box in titles[: 2 * n_heads] if box.width]
    assert all(one.x1 < other.x0 for one, other in pairwise(sorted(above, key=lambda b: b.x0)))


def test_circuits_say_that_not_all_seeds_are_drawn():
    assert "first 8 of 16 seeds" in plots.draw(tiled("circuits", 16)).get_suptitle()
    assert "first" not in plots.draw(tiled("circuits", 8)).get_suptitle()


def outside(**variables: object) -> xr.Dataset:
    data = xr.Dataset(variables, coords={"seed": [0, 1], "step": [0, 5, 500]})
    data.attrs = {"probe": "made_elsewhere", "statement": "it works"}
    return data


def test_probes_without_a_figure_get_the_generic_one(tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 3))
    data = outside(
        speed=(("seed", "step"), values, {"units": "nat", "long_name": "speed of it"}),
        each=(("seed", "step", "head"), np.zeros((2, 3, 2)), {"units": "1"}),
        never=(("seed", "step"), np.full((2, 3), np.nan), {"units": "1", "long_name": "never"}),
        undefined=(("seed", "step"), np.zeros((2, 3))),
        scalar=((), 1.0),
        since=(("seed",), np.array([5.0, np.nan])),
    )
    figure = plots.draw(data)
    figure.savefig(tmp_path / "figure.png", dpi=30)
    drawn = {axes.get_title(): axes for axes in figure.axes if axes.axison}
    never = "never\nundefined: seeds 0, 1 (no reason given)"
    assert set(drawn) == {"speed of it", "each, head 0", "each, head 1", never}
    assert drawn["speed of it"].get_ylabel() == "speed [nat]"
    np.testing.assert_array_equal(drawn["speed of it"].lines[1].get_ydata(), values[1])
    assert [text.get_text() for text in drawn[never].texts] == ["undefined"]
    assert "it works: 1 of 2 seeds" in figure.get_suptitle()
    assert labels(figure) == {"seed 0", "seed 1"}


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        ([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]], "it works: 1 of 2 seeds"),
        ([[np.nan, 0.0, 1.0], [0.0, 1.0, np.nan]], "it works: 1 of 2 seeds, undefined for 1"),
        ([[1.0, 1.0, np.nan], [np.nan] * 3], "it works: 0 of 2 seeds, undefined for 2"),
    ],
)
def test_a_verdict_that_is_undefined_is_no_no(holds, said):
    data = outside(holds=(("seed", "step"), np.array(holds)))
    assert style.verdicts(data.assign(since=since(data["holds"]))) == said


def test_the_name_of_a_helper_is_no_figure():
    data = outside(speed=(("seed", "step"), np.zeros((2, 3)), {"units": "1"}))
    for name in ("style", "generic", None):
        data.attrs["probe"] = name
        assert isinstance(plots.draw(data), matplotlib.figure.Figure)


def test_a_result_with_nothing_over_steps_still_draws(tmp_path):
    generic.draw(outside(scalar=((), 1.0))).savefig(tmp_path / "figure.png", dpi=30)


def test_many_seeds_can_be_told_apart():
    looks = {(style.colour(seed), style.dash(seed)) for seed in range(32)}
    assert len(looks) == 32


def test_no_figure_touches_pyplot_or_any_layer_but_schema():
    code = (
        "import sys, mechicl.plots as p, importlib\n"
        "for name in (*p.OWN, 'generic'): importlib.import_module(f'mechicl.plots.{name}')\n"
        "names = [m for m in sys.modules if m.startswith('mechicl.')]\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "print(sorted({n.split('.')[1] for n in names}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    layers = set(ast.literal_eval(done.stdout))
    assert {"plots", "schema"} <= layers <= {"errors", "plots", "schema", "version"}


def test_a_long_statement_is_broken_before_the_legend():
    result = result_of("homogeneous_kq")
    result.attrs["statement"] = "the live heads have one scale " * 5
    figure = plots.draw(result)
    figure.draw_without_rendering()
    title, legend = figure._suptitle, figure.legends[0]
    assert "\n" in title.get_text()
    assert not title.get_window_extent().overlaps(legend.get_window_extent())
