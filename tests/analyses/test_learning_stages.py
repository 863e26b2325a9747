"""Stages of runs made by hand, whose entries, phases and transitions are known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from mechicl import analyses
from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.schema import flag_names
from tests import trajectories
from tests.analyses import markov_toy
from tests.analyses.markov_toy import Toy, chain, on_blocks

PROBE = analyses.get("learning_stages")


def measure(toy: Toy, **settings: object) -> xr.Dataset:
    return PROBE(toy.trajectory, toy.forward(), **({"n_prompts": 100} | settings))


def counts(result: xr.Dataset) -> dict[str, int]:
    return json.loads(result.attrs["n_undefined"])


def phases(result: xr.Dataset) -> list[list[str]]:
    meaning = {float(code): name for code, name in flag_names(result["phase"]).items()}
    return [[meaning.get(code, "") for code in row] for row in result["phase"].values]


STAGED = [
    *["before_any_block"] * 2,
    *["competitive"] * 2,
    *["cooperative"] * 2,
    "all_blocks_entered",
]


def test_three_stages_in_order():
    """Masses are written: 0.9 on block 1 from 100 on, on block 2 from 700, on block 3 at 1500."""
    result = measure(markov_toy.learning(3))
    for seed in range(3):  # heads are in another order in each
        np.testing.assert_array_equal(result["entered"][seed], [100, 700, 1500])
        np.testing.assert_array_equal(result["entered_error"][seed], [50, 300, 250])
    np.testing.assert_array_equal(result["n_stages"], 3)
    np.testing.assert_array_equal(result["in_order"], 1)
    np.testing.assert_array_equal(result["competitive_until"], 400)
    np.testing.assert_array_equal(result["holds"], [[0] * 6 + [1]] * 3)
    np.testing.assert_array_equal(result["since"], 1500)
    assert phases(result) == [STAGED] * 3
    assert (result["undefined"] == 0).all()
    assert result["block"].values.tolist() == [1, 2, 3]


def test_the_overlap_by_hand():
    result = measure(markov_toy.learning(1))
    # Two heads on (0.9, 0.05, 0.05), one on (0.7, 0.25, 0.05); then on (0.05, 0.9, 0.05).
    np.testing.assert_allclose(result["overlap"][0, 2:5], [1.0, 0.8, 0.15], atol=1e-6)
    np.testing.assert_allclose(result["overlap"][0, 0], 1.0, atol=1e-6)


def test_what_is_on_no_block_overlaps_too():
    task = chain(blocks=((0, 1), (3,)))
    toy = markov_toy.sparse(task, on_blocks(task, [[[[0.2, 0.1], [0.5, 0.1]]]]))
    # 0.2 of block 1, 0.1 of block 2 and 0.4 of the rest.
    np.testing.assert_allclose(measure(toy)["overlap"], 0.7, atol=1e-6)


def test_masses_and_divergences_are_those_of_the_other_probes():
    toy = markov_toy.learning(2)
    result = measure(toy, n_prompts=50)
    spans = analyses.get("attention_spans")(toy.trajectory, toy.forward())
    xr.testing.assert_allclose(result["mass"], spans["mass"])
    kl = analyses.get("context_kl")(toy.trajectory, toy.forward(), n_prompts=50)
    xr.testing.assert_identical(result["kl"], kl["kl"])
    xr.testing.assert_equal(result["loss"], kl["loss"])


def test_attention_without_values_is_no_stage():
    """The same patterns, of which the model makes nothing: block 1 is not entered either."""
    toy = markov_toy.learning(1)
    toy.trajectory["OV"].values[...] = 0.0
    result = measure(toy)
    assert result["entered"].isnull().all() and result["entered_error"].isnull().all()
    assert result["n_stages"].item() == result["in_order"].item() == 0
    assert result["competitive_until"].isnull().all()
    np.testing.assert_array_equal(result["holds"], 0)
    assert phases(result) == [["before_any_block"] * 7]


def test_not_reached_is_nan_and_not_the_last_step():
    toy = markov_toy.learning(1)
    result = measure(replace(toy, trajectory=toy.trajectory.isel(step=slice(0, 6))))
    np.testing.assert_array_equal(result["entered"], [[100, 700, np.nan]])
    assert result["n_stages"].item() == 2 and result["in_order"].item() == 0
    assert np.isnan(result["since"].item())
    assert phases(result) == [STAGED[:6]]


def test_a_single_step_shows_no_stages():
    """A trained model of which nothing earlier is known has not entered nothing."""
    toy = markov_toy.learning(1)
    for alone in ({"trajectory": toy.trajectory.isel(step=[-1])}, {}):
        result = measure(replace(toy, **alone), n_steps=1)
        assert result.sizes["step"] == 1
        for name in ("entered", "n_stages", "in_order", "phase", "holds"):
            assert result[name].isnull().all(), name
        assert result["loss"].notnull().all() and result["mass"].notnull().all()
        assert counts(result)["single_step"] == 1
        assert counts(result)["undefined_at_another_step"] == 0


def test_heads_that_stay_alike_compete_to_the_end():
    toy = markov_toy.learning(1)
    for name in ("KQ", "OV"):
        values = toy.trajectory[name].values
        values[...] = values[..., :1, :, :]
    result = measure(toy)
    np.testing.assert_array_equal(result["entered"], [[100, np.nan, np.nan]])
    np.testing.assert_allclose(result["overlap"], 1, atol=1e-6)
    assert result["competitive_until"].isnull().all()
    assert phases(result) == [["before_any_block"] * 2 + ["competitive"] * 5]
    assert result["n_stages"].item() == 1


def test_blocks_that_are_entered_together_are_one_stage():
    task = chain(importance=1.0, orthogonal_features=True)
    even, alone = [[0.5, 0.5]] * 2, [[0.9, 0.1], [0.1, 0.9]]
    mass = np.array([[even, even, alone, alone]])
    maps = np.array([0, 0, 1, 1])[None, :, None, None, None] * task.features
    result = measure(markov_toy.sparse(task, on_blocks(task, mass), maps))
    np.testing.assert_array_equal(result["entered"], [[20, 20]])
    assert result["n_stages"].item() == result["in_order"].item() == 1


def test_a_later_block_first_is_not_in_order():
    """KL(blocks_1 ‖ model) never falls here: what the model has is seen against the chain."""
    task = chain(importance=1.0, orthogonal_features=True, base_scale=3.0)
    even = [[0.5, 0.5]] * 2
    later, both = [[0.5, 0.5], [0.05, 0.95]], [[0.95, 0.05], [0.05, 0.95]]
    on = np.array([[0, 0], [0, 0], [0, 1], [0, 1], [1, 1], [1, 1]])[None, :, :, None, None]
    mass = np.array([[even, even, later, later, both, both]])
    toy = markov_toy.sparse(task, on_blocks(task, mass), on * task.features)
    result = measure(toy)
    np.testing.assert_array_equal(result["entered"], [[40, 20]])
    assert result["kl"][0, 1:, 0].min() > result["kl"][0, 0, 0] / 2
    assert result["n_stages"].item() == 2 and result["in_order"].item() == 0
    np.testing.assert_array_equal(result["holds"], 0)


def logistic(steps: np.ndarray, middle: float) -> np.ndarray:
    return 1 / (1 + (middle / np.maximum(steps, 1e-9)) ** 8)


def long_run() -> Toy:
    """Return two heads: one settles on block 1 by step 30, the other leaves it for 2 by 600."""
    task = chain(orthogonal_features=True, base_scale=3.0)
    steps = np.append(0, np.unique(np.rint(np.geomspace(1, 5000, 60)))).astype(int)
    one, two = logistic(steps, 30.0), logistic(steps, 600.0)
    first = np.stack([0.5 + 0.45 * one, 0.5 - 0.45 * one], -1)
    second = first * (1 - two)[:, None] + np.array([0.05, 0.95]) * two[:, None]
    mass = np.stack([first, second], 1)[None]
    weights = np.stack(
        [np.stack([one * (1 - two / 2), 0 * two], -1), np.stack([one * (1 - two) / 2, two], -1)], 1
    )
    weights[:, 0, 0] = one * (1 + two) / 2
    maps = np.einsum("thk,kij->thij", weights, task.features)[None]
    return markov_toy.sparse(task, on_blocks(task, mass), maps, steps=steps)


def test_transitions_of_a_long_run():
    result = measure(long_run())
    names = list(flag_names(result["curve"]).values())
    assert names == ["loss", "KL(blocks_1||model)", "mass(block_1)", "mass(block_2)"]
    assert result["transition"].values[0] == 1

    def of(name: str) -> xr.Dataset:
        one = result.isel(seed=0, curve=names.index(name))
        return one.dropna("transition", subset=["transition_step"])

    mass = of("mass(block_1)")
    np.testing.assert_allclose(mass["transition_step"], [30], rtol=0.1)
    np.testing.assert_allclose(mass["change"], [0.45], atol=0.05)
    # Both heads leave block 2, then one goes there.
    mass = of("mass(block_2)")
    np.testing.assert_allclose(mass["transition_step"], [30, 600], rtol=0.1)
    np.testing.assert_allclose(mass["change"], [-0.45, 0.9], atol=0.06)
    loss = of("loss")
    assert loss.sizes["transition"] == 2 and (loss["change"] < 0).all()
    assert 15 < loss["transition_step"][0] < 45 and 350 < loss["transition_step"][1] < 800
    # The second is the way of the root of the divergence from the plateau to the end.
    kl = result["kl"].isel(seed=0, reference=-1)
    plateau, end = kl.sel(step=150, method="nearest").item(), kl[-1].item()
    assert loss["change"][1].item() == pytest.approx(end**0.5 - plateau**0.5, rel=0.15)
    assert abs(end - plateau) < 0.7 * abs(end**0.5 - plateau**0.5)
    # The model comes near blocks_1, and leaves it: a dip.
    kl = of("KL(blocks_1||model)")
    assert kl["change"].values[0] < 0 < kl["change"].values[-1]
    for each in (mass, loss, kl):
        assert (each["transition_low"] <= each["transition_step"]).all()
        assert (each["transition_step"] <= each["transition_high"]).all()


def test_few_prompts_and_many_agree_on_stages():
    """Entries are of patterns that have no noise here; the proviso is far from its threshold."""
    toy = long_run()
    few, many = measure(toy, n_prompts=20), measure(toy, n_prompts=400, evaluation_seed=1)
    xr.testing.assert_equal(few["entered"], many["entered"])
    assert few["entered"].notnull().all()
    assert not few["kl"].equals(many["kl"])


def test_thresholds_are_parameters():
    toy = markov_toy.learning(1)
    np.testing.assert_array_equal(measure(toy, rise=0.1)["entered"], [[50, 700, 1250]])
    np.testing.assert_array_equal(measure(toy, simultaneous=10.0)["n_stages"], [1])
    assert measure(toy, least_overlap=0.9)["competitive_until"].item() == 100
    assert measure(long_run(), least_change=0.99)["transition_step"].sizes["transition"] == 1


def test_a_seed_that_diverged_has_no_stages():
    toy = markov_toy.learning(2)
    trajectory = markov_toy.poison(toy.trajectory, seed=1, from_index=5)
    result = measure(replace(toy, trajectory=trajectory))
    whole = measure(toy)
    for name in ("entered", "n_stages", "in_order", "competitive_until", "phase", "holds"):
        np.testing.assert_array_equal(result[name][0], whole[name][0])
        assert result[name][1].isnull().all()
    assert result["transition_step"][1].isnull().all() and np.isnan(result["since"][1])
    # What is measured at a step is there as long as the model is.
    xr.testing.assert_equal(result["kl"][1, :5], whole["kl"][1, :5])
    xr.testing.assert_equal(result["mass"][1, :5], whole["mass"][1, :5])
    assert counts(result)["nonfinite_parameters"] == 2
    assert counts(result)["undefined_at_another_step"] == 5


def test_a_single_head_has_no_phases():
    task = chain(orthogonal_features=True)
    mass = np.array([[[[0.5, 0.5]], [[0.5, 0.5]], [[0.95, 0.05]], [[0.95, 0.05]]]])
    maps = np.array([0, 0, 1, 1])[None, :, None, None, None] * task.features[:1]
    result = measure(markov_toy.sparse(task, on_blocks(task, mass), maps))
    assert result["overlap"].isnull().all() and result["phase"].isnull().all()
    np.testing.assert_array_equal(result["entered"], [[20, np.nan]])
    np.testing.assert_array_equal(result["holds"], 0)
    assert counts(result)["single_head"] == 4


def test_a_model_of_shorter_context_never_enters_what_it_cannot_see():
    task = chain(orthogonal_features=True)
    pattern = np.array([[[[0.5, 0.5]] * 2] * 4])
    on = np.array([0, 0, 1, 1])[None, :, None, None, None]
    toy = markov_toy.sparse(task, pattern, 0.5 * on * task.features[0], context=2)
    result = measure(toy)
    np.testing.assert_allclose(result["mass"][..., 0], 1, atol=1e-6)
    np.testing.assert_array_equal(result["mass"][..., 1], 0)
    # All of its attention is on block 1 from the start: there is nothing to rise.
    assert result["entered"].isnull().all()


def test_the_decoder_too():
    """Patterns of tokens are averaged over prompts."""
    task = chain(orthogonal_features=True)
    mass = np.array([[[[0.5, 0.5]] * 2, [[0.5, 0.5]] * 2, [[0.95, 0.05], [0.05, 0.95]]]])
    toy = markov_toy.decoder(task, on_blocks(task, mass), token_scores=0.3)
    result = measure(toy, n_prompts=20, n_pattern_prompts=10)
    spans = analyses.get("attention_spans")(toy.trajectory, toy.forward(), n_prompts=10)
    xr.testing.assert_allclose(result["mass"], spans["mass"])
    assert (result["overlap"][0, 2] < result["overlap"][0, 0]).item()


def test_heads_of_two_layers_are_compared_in_their_layer():
    """By the arrays alone: what overlaps in one layer and not in the other is the least."""
    from mechicl.analyses.learning_stages import _overlap

    mass = np.array([[[0.9, 0.1], [0.9, 0.1]], [[0.8, 0.2], [0.3, 0.7]]])[None, None]
    coords = {"seed": [0], "step": [0], "block": [1, 2]}
    dims = ("seed", "step", "layer", "head", "block")
    spans = xr.Dataset({"mass": (dims, mass), "elsewhere": (dims[:-1], 1 - mass.sum(-1))}, coords)
    np.testing.assert_allclose(_overlap(spans), [[0.5]])


def test_other_tasks_are_refused():
    with pytest.raises(NothingToAnalyseError, match="the run has no lag_weights, features, temp"):
        PROBE(trajectories.learning(), markov_toy.learning().forward())


@pytest.mark.parametrize("settings", [{"rise": 0}, {"least_overlap": 1.5}, {"n_steps": 0}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(InputError, match=next(iter(settings))):
        measure(markov_toy.learning(1), **settings)
