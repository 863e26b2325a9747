"""What sliders move through: how steps are thinned, and what models have to show."""

import numpy as np
import pytest
import xarray as xr

import mechicl
from mechicl.plots.interactive import HeatMap, explorer, limits, scripts
from mechicl.run import Run
from mechicl.studies.report import explore, figures

CHAIN = {
    "task": {"name": "markov_chain", "d": 4, "blocks": [2, 2], "n_predictions": 3},
    "batch_size": 8,
    "n_steps": 4,
    "seeds": [0, 1],
}
POOLED = {
    "task": {
        "name": "latent_regression",
        "prior": {"kind": "tree", "depth": 2},
        "n_context": 16,
        "n_queries": 2,
    },
    "model": {"name": "pooled_attention", "n_layers": 2, "n_channels": 2},
    "warmup_steps": 0,
    "batch_size": 4,
    "n_steps": 4,
    "seeds": [0],
}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("explore") / "chain"
    return mechicl.train("yuksel2026-minimal", path, overrides=CHAIN, compile=False)


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("explore") / "pooled"
    return mechicl.train("raj2026-tree-deep", path, overrides=POOLED, compile=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 60, 120])
def test_steps_are_thinned_evenly_in_both_scales(n: int) -> None:
    steps = np.arange(0, 10_001, 50)
    chosen = explore.spread(steps, n)
    assert len(chosen) <= n
    assert (np.diff(chosen) > 0).all()
    assert chosen[-1] == len(steps) - 1
    if n > 1:
        assert chosen[0] == 0
    if n >= 60:
        shown = steps[chosen]
        assert np.diff(shown).max() <= 3 * 10_000 / n, "no gap on a linear scale"
        assert (shown[1:4] == steps[1:4]).all(), "nor at the start on a logarithmic one"


def test_few_steps_are_all_there() -> None:
    assert explore.spread(np.array([0, 5, 7]), 3).tolist() == [0, 1, 2]
    assert explore.spread(np.array([3]), 100).tolist() == [0]


def test_losses_are_means_over_stretches_of_steps(
    small: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, text = explore._loss(small, [0, 3])
    assert text == "every value that was logged"
    monkeypatch.setattr(explore, "_LOSS_POINTS", 8)
    thinned, text = explore._loss(small, [0, 3])
    n = thinned.sizes["log_step"]
    assert 4 <= n <= 9
    assert text == f"means over {n} stretches of {whole.sizes['log_step']} steps"
    first, last = (thinned.isel(log_step=[0, -1]), whole.isel(log_step=[0, -1]))
    np.testing.assert_allclose(first, last, rtol=1e-6)
    steps = thinned["log_step"].values
    assert (np.diff(steps) > 0).all()
    assert whole.values.min() <= thinned.values.min() <= thinned.values.max() <= whole.values.max()


def test_losses_that_diverged_stay_undefined(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "_LOSS_POINTS", 8)

    def broken(part: xr.Dataset, where: object) -> xr.Dataset:
        out = part.compute()
        out["loss"][1, 20:] = np.nan
        return out

    monkeypatch.setattr(explore, "load", broken)
    thinned, _ = explore._loss(small, [0, 3])
    assert np.isfinite(thinned[0]).all()
    assert np.isnan(thinned[1, -1])


def test_a_markov_model_shows_its_circuits_and_a_mean_of_its_patterns(chain: Run) -> None:
    shown = explore.of_run(chain, {}, attention=True)
    assert {name: drawn.values.dims[3:] for name, drawn in shown.maps.items()} == {
        "KQ": ("head", "d_key", "d_query"),
        "OV": ("head", "d_out", "d_in"),
        "attention": ("head", "query_pos", "key_pos"),
    }
    np.testing.assert_array_equal(shown.maps["KQ"].values, chain.params["KQ"])
    patterns = shown.maps["attention"].values
    prompts = chain.task.sample(8, seed=0)
    cache = chain.cache("blocks.0.attn.hook_pattern", prompts=prompts)
    expected = cache["blocks.0.attn.hook_pattern"].mean("batch").expand_dims("layer", axis=2)
    np.testing.assert_allclose(patterns, expected, atol=1e-6)
    assert not shown.maps["attention"].symmetric
    assert shown.notes == []


def test_a_pooling_model_says_why_it_has_neither(pooled: Run) -> None:
    shown = explore.of_run(pooled, {}, attention=True)
    assert {name: drawn.values.dims[4:] for name, drawn in shown.maps.items()} == {
        "V": ("measurement", "d_model")
    }
    rows = shown.maps["V"].values.isel(seed=0, step=-1, layer=0, channel=0)
    expected = pooled.params["W_V"].isel(seed=0, step=-1)
    np.testing.assert_array_equal(rows, expected.values.reshape(4, -1))
    assert any(note.startswith("KQ and OV are not shown") for note in shown.notes)
    assert any(note.startswith("attention is not shown") for note in shown.notes)


def test_what_is_too_large_is_thinned_or_left_out(
    chain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"KQ": 10, "OV": 300, "V": 10, "attention": 10**6}
    monkeypatch.setattr(explore, "_MOST_ENTRIES", limits)
    monkeypatch.setattr(explore, "_FEWEST_STEPS", 2)
    shown = explore.of_run(chain, {}, attention=False)
    assert "KQ" not in shown.maps
    (note,) = [each for each in shown.notes if each.startswith("KQ is left out")]
    assert "entries, and a page holds 10" in note
    drawn = shown.maps["OV"].values
    assert drawn.size <= 300
    assert drawn["step"].values[-1] == chain.steps[-1]
    assert f"OV: {drawn.sizes['step']} of {len(chain.steps)} checkpoints" in shown.notes
    assert any(note.startswith("attention is left out, as asked") for note in shown.notes)


def test_many_seeds_are_cut_and_said(chain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "MOST_SEEDS", 1)
    shown = explore.of_run(chain, {}, attention=False)
    assert shown.maps["KQ"].values["seed"].values.tolist() == [0]
    assert "interactive plots: the first 1 of 2 seeds" in shown.notes


def test_headlines_by_head_are_a_curve_a_head(small: Run) -> None:
    found = explore._curves({"circuits": small.analyze("circuits")}, [0, 3], [])
    assert list(found) == [
        f"circuits: {name}, head {head}" for name in ("omega", "mu") for head in (0, 1)
    ]
    assert all(set(curve.dims) == {"seed", "step"} for curve in found.values())


def test_the_largest_page_is_below_five_megabytes() -> None:
    """Every part at its limit: heat maps of 16 panels, curves and losses of 8 seeds, figures."""
    rng = np.random.default_rng(0)
    seeds = list(range(explore.MOST_SEEDS))
    steps = np.arange(explore.MOST_STEPS) * 50

    def over(dim: str, n: int) -> xr.DataArray:
        coords = {"seed": seeds, dim: 7 * np.arange(n)}
        return xr.DataArray(rng.normal(size=(len(seeds), n)), coords, ("seed", dim))

    maps = {}
    for name, most in explore._MOST_ENTRIES.items():
        if name != "V":  # in place of KQ and OV
            shape = (len(seeds), 8, 1, 16, 5, most // (len(seeds) * 8 * 16 * 5))
            assert np.prod(shape) > 0.95 * most
            dims = ("seed", "step", "layer", "head", "d_key", "d_query")
            drawn = xr.DataArray(
                rng.normal(size=shape), {"seed": seeds, "step": np.arange(8)}, dims
            )
            maps[name] = HeatMap(drawn, limits(drawn), symmetric=True)
    curves = {
        f"a_probe_of_a_long_name: variable {number}": over("step", explore.MOST_STEPS)
        for number in range(explore._MOST_CURVES)
    }
    loss = over("log_step", explore._LOSS_POINTS)
    plots = explorer(steps, seeds, loss=loss, curves=curves, maps=maps)
    assert len(plots.script) + len(scripts()) + figures.BUDGET < 4_900_000
