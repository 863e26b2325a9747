import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import mechicl
from mechicl import analyses, plots
from mechicl.analyses import transplants
from mechicl.analyses.transplants import choose_donors
from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.models.evaluate import one_thread_an_operation
from mechicl.theory import priors
from tests import trajectories
from tests.analyses import pooled_toy, transplant_toy

PROBE = analyses.get("key_patching")
TREE = pooled_toy.tree()


def counts(result):
    return json.loads(result.attrs["n_undefined"])


def by_hand(toy, seed, donors, inputs, targets, n_queries):
    """Return losses (patch_layer, tree_distance, context), one prompt at a time in float64."""
    model = toy.model.hooked(toy.task, pooled_toy.weights_at(toy.trajectory, seed))
    names = [f"blocks.{layer}.attn.hook_dynamic_key" for layer in range(toy.model.n_layers)]
    prompts = [torch.from_numpy(each[None].astype(float)) for each in inputs]
    out = np.empty((len(names) + 1, donors.index.shape[1], len(inputs)))
    with torch.no_grad(), one_thread_an_operation():
        caches = [model.run_with_cache(prompt, names_filter=names)[1] for prompt in prompts]
        for start, distance, target in np.ndindex(out.shape):
            cache = caches[donors.index[target, distance]]
            hooks = [(name, partial(replaced, given=cache[name])) for name in names[start:]]
            predicted = model.run_with_hooks(prompts[target], fwd_hooks=hooks)[0].numpy()
            errors = (predicted - targets[target])[:n_queries] ** 2
            out[start, distance, target] = errors.mean()
    return out


def replaced(value, hook, given):
    return given


@pytest.mark.parametrize("kind", ["A", "B", "between"])
def test_one_prompt_at_a_time_by_hand(kind, monkeypatch):
    monkeypatch.setattr(transplants, "AT_ONCE", 1000)  # several parts
    made = pooled_toy.model(kind) if kind != "between" else pooled_toy.model("A", 2, n_channels=2)
    toy = pooled_toy.random(TREE, made, n_seeds=2, n_steps=2)
    forward = toy.forward()
    cut = transplants.parts(30, forward, 5)
    assert len(cut) > 2 and {size for size, _ in cut} == {10}
    result = PROBE(toy.trajectory, forward, n_prompts=30, n_queries=3, evaluation_seed=5)
    drawn = [forward.sample(size, 5, part=part) for size, part in cut]
    leaves, inputs, targets = (
        np.concatenate([each[name].values for each in drawn])
        for name in ("leaf", "inputs", "targets")
    )
    donors = choose_donors(leaves, 3, np.random.default_rng([5, 30]))
    kept = donors.found.all(-1)
    assert result["n_contexts"] == kept.sum() >= 20
    toy_last = pooled_toy.Toy(TREE, made, toy.trajectory.isel(step=[-1]))
    for seed in range(2):
        one = result.isel(seed=seed, step=0)
        loss = by_hand(toy_last, seed, donors, inputs, targets, 3)[..., kept]
        n = kept.sum()
        expected = {
            "loss": loss.mean(-1),
            "loss_error": loss.std(-1, ddof=1) / n**0.5,
            "increase": (loss - loss[-1:]).mean(-1),
            "increase_error": (loss - loss[-1:]).std(-1, ddof=1) / n**0.5,
        }
        for name, values in expected.items():
            found = one[name].transpose("patch_layer", "tree_distance")
            np.testing.assert_allclose(found, values, rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(one["clean_loss"], loss[-1, 0].mean(), rtol=1e-10)
        np.testing.assert_array_equal(one["effect"], one["increase"][0, -1])
        assert abs(one["same_leaf"]) == abs(one["increase"][:, 0]).max()
        assert abs(one["own_keys"]) < 1e-13
    assert kind == "B" or (abs(result["effect"]) > 1e-6).all()


def test_keys_of_one_layer_do_not_depend_on_the_context():
    """The negative control: model B, in the precision of a run."""
    toy = pooled_toy.random(TREE, pooled_toy.model("B"), n_seeds=3)
    single = toy.trajectory.astype(np.float32)
    for name, value in toy.trajectory.items():
        single[name].attrs = value.attrs
    for trajectory in (toy.trajectory, single):
        result = PROBE(trajectory, toy.forward(), n_prompts=300)
        np.testing.assert_array_equal(result["increase"], 0)
        np.testing.assert_array_equal(result["holds"], 0)
        assert (result["clean_loss"] > 0.1).all()


def spelt(task, leaf, donor, start):
    """Return the leaf that a model which follows the tree reads, without noise.

    Its key for node v is e_v less 1/(K + 1) everywhere, so that layer m adds to ε, in units of the
    spin's size, θ_v − (Σθ + |θ|² + σ²)/(K + 1) at the node that the spins before lead to: those
    that it has found, or from layer `start` on those of the donor.
    """
    depth, theta = task.prior.depth, task.prior.leaves[leaf]
    sizes = priors.tree_steps(depth, task.prior.alpha)
    bias = (theta.sum() + 1 + task.noise_variance) / task.d_model
    found = 0
    for m in range(depth):
        path = donor >> (depth - m) if m >= start else found
        read = (theta[2**m - 1 + path] - bias) / sizes[m]
        found = 2 * found + int(0.1 + read > 0)
    return found


def test_a_model_that_follows_the_tree():
    """In closed form: queries see the difference of the leaf that is read, and of their own."""
    task = pooled_toy.tree(tau=1e-3, n_context=100_000)
    toy, forward = pooled_toy.following(task), transplant_toy.reading(task)
    result = PROBE(toy.trajectory, forward, n_prompts=400)
    drawn = forward.sample(400, 0)
    leaves, queries = drawn["leaf"].values, drawn["inputs"].values[:, -4:, :-1].astype(float)
    assert {spelt(task, leaf, leaf, 0) == leaf for leaf in range(8)} == {True}
    donors = choose_donors(leaves, 3, np.random.default_rng([0, 400])).index
    expected = np.zeros((4, 4, 400))
    for start, distance, target in np.ndindex(3, 4, 400):
        leaf, donor = leaves[target], leaves[donors[target, distance]]
        wrong = task.prior.leaves[spelt(task, leaf, donor, start)] - task.prior.leaves[leaf]
        expected[start, distance, target] = ((queries[target] @ wrong) ** 2).mean()
    table = result["loss"][0, 0].transpose("patch_layer", "tree_distance")
    np.testing.assert_allclose(table, expected.mean(-1), rtol=1e-5, atol=1e-9)
    # Two leaves that differ in the last spin have the same three nodes; l0 = 2 changes one node.
    assert table[0, 3] > 1 > table[2, 3] > 0.2 > table[0, 1] == pytest.approx(0, abs=1e-9)
    assert result["holds"].item() == 1
    assert result["effect"].item() == pytest.approx(expected[0, 3].mean(), rel=1e-5)


def test_a_verdict_asks_for_each_of_its_parts():
    task = pooled_toy.contract_task()
    toy = pooled_toy.following(task, n_seeds=1)
    forward = transplant_toy.reading(task)
    assert PROBE(toy.trajectory, forward, n_prompts=200)["holds"].item() == 1
    assert PROBE(toy.trajectory, forward, n_prompts=200, margin=1e6)["holds"].item() == 0

    def renamed(change):
        """Return what the run gives where leaves have other names."""

        def sample(n, seed, *, part=0):
            drawn = forward.sample(n, seed, part=part)
            return drawn.assign(leaf=("batch", change(drawn["leaf"].values)))

        other = analyses.Forward(**{**vars(forward), "sample": sample})
        return PROBE(toy.trajectory, other, n_prompts=400)

    # Spins in reverse: the loss does not rise with such a distance.
    reverse = renamed(lambda leaf: sum(((leaf >> bit) & 1) << (2 - bit) for bit in range(3)))
    assert reverse["effect"] < 0.7 * reverse["increase"].max()
    assert reverse["effect"] > 3 * reverse["effect_error"]
    assert reverse["holds"].item() == 0
    # Leaves at random: there is an effect, the same at all distances, the same leaf's included.
    rng = np.random.default_rng(0)
    names = rng.integers(0, 8, 400)
    blind = renamed(lambda leaf: names[: len(leaf)])
    assert blind["effect"] > 3 * blind["effect_error"]
    steps = np.diff(blind["loss"][0, 0].transpose("patch_layer", "tree_distance")[0])
    assert (abs(steps) < 4 * blind["effect_error"].item()).all()
    assert blind["same_leaf"] > 0.5 * blind["effect"] and blind["holds"].item() == 0


def test_contexts_without_donors_are_left_out():
    toy = pooled_toy.random(TREE, pooled_toy.model("A"), n_seeds=1)
    result = PROBE(toy.trajectory, toy.forward(), n_prompts=2)
    assert result["n_contexts"] == 0
    assert counts(result)["fewer_than_two_contexts_with_donors"] == 1
    assert result["loss"].isnull().all() and result["holds"].isnull().all()
    plots.draw(result)


def test_diverged_seeds_and_losses_that_overflow():
    toy = pooled_toy.random(TREE, pooled_toy.model("A"), n_seeds=3, n_steps=2)
    trajectory = pooled_toy.poison(toy.trajectory, seed=1, from_index=1)
    trajectory["W_U"].values[2, 1] = 1e200
    result = PROBE(trajectory, toy.forward(), n_prompts=60, n_steps=2)
    assert counts(result) == {
        "nonfinite_parameters": 1,
        "nonfinite_predictions": 1,
        "fewer_than_two_contexts_with_donors": 0,
    }
    np.testing.assert_array_equal(result["undefined"], [[0, 0], [0, 1], [0, 2]])
    alone = PROBE(toy.trajectory.isel(seed=[0]), toy.forward(), n_prompts=60, n_steps=2)
    np.testing.assert_array_equal(result["loss"][0], alone["loss"][0])


def test_steps_are_each_their_own_and_targets_have_all_queries():
    toy = pooled_toy.random(TREE, pooled_toy.model("A"), n_seeds=1, n_steps=3)
    whole = PROBE(toy.trajectory, toy.forward(), n_prompts=60, n_steps=3)
    last = PROBE(toy.trajectory, toy.forward(), n_prompts=60)
    np.testing.assert_array_equal(whole["loss"][:, -1:], last["loss"])
    more = PROBE(toy.trajectory, toy.forward(), n_prompts=60, n_queries=99)
    np.testing.assert_array_equal(more["loss"], last["loss"])  # there are four


def test_runs_without_leaves_or_without_keys_of_mlps():
    for task, kind, reason in (
        (pooled_toy.gaussian(), "A", "this run has another prior"),
        (TREE, "C", "this model has none"),
    ):
        toy = pooled_toy.random(task, pooled_toy.model(kind))
        with pytest.raises(NothingToAnalyseError, match=reason):
            PROBE(toy.trajectory, toy.forward())
    assert "the run has no" in str(PROBE.objection(trajectories.from_scales([0.1], [1.0])))


@pytest.mark.parametrize("settings", [{"n_prompts": 1}, {"negligible": 1}, {"n_queries": 0}])
def test_wrong_settings_are_refused(settings):
    toy = pooled_toy.random(TREE, pooled_toy.model("A"))
    with pytest.raises(InputError, match=next(iter(settings))):
        PROBE(toy.trajectory, toy.forward(), **settings)


def test_a_figure_with_the_controls():
    task = pooled_toy.contract_task()
    toy = pooled_toy.following(task, n_seeds=6)
    result = PROBE(toy.trajectory, transplant_toy.reading(task), n_prompts=100)
    figure = plots.draw(result)
    *panels, _ = figure.axes
    assert len(panels) == 4 and "first 4 of 6 seeds" in figure.get_suptitle().replace("\n", " ")
    labels = [tick.get_text() for tick in panels[0].get_xticklabels()]
    assert labels == ["0", "1", "2", "none"]
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == ["same", "1", "2", "3"]
    assert len(panels[0].texts) == 16


def test_from_the_facade(tmp_path: Path):
    overrides: dict[str, object] = {
        "task": {
            "name": "latent_regression",
            "prior": {"kind": "tree", "depth": 2},
            "n_context": 32,
            "n_queries": 2,
        },
        "model": {"name": "pooled_attention", "n_layers": 2},
        "batch_size": 8,
        "n_steps": 2,
        "seeds": [0, 1],
        "checkpoints": {"every": 1},
    }
    run = mechicl.train("yuksel2026-minimal", tmp_path / "run", overrides=overrides, compile=False)
    result = run.analyze("key_patching", n_prompts=40)
    assert result["loss"].notnull().all() and abs(result["own_keys"]).max() < 1e-6
    followed = run.analyze("function_vector", n_prompts=40)
    np.testing.assert_array_equal(followed["last_follows"], 1)
    np.testing.assert_array_equal(followed["self_change"], 0)
    for each in (result, followed):
        run.save(each)
