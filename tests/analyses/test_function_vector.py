import json

import numpy as np
import pytest
import torch

from mechicl import analyses, plots
from mechicl.analyses import transplants
from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.models.evaluate import one_thread_an_operation
from tests import trajectories
from tests.analyses import pooled_toy, transplant_toy

PROBE = analyses.get("function_vector")
TREE = pooled_toy.tree()


def counts(result):
    return json.loads(result.attrs["n_undefined"])


def pairs_of(forward, n, seed):
    """Return prompts of the own contexts, of the donors' with the same queries, and both θ."""
    parts = [
        forward.sample(2 * size, seed, part=part)
        for size, part in transplants.parts(n, forward, seed)
    ]
    own, other = (
        {
            name: np.concatenate([np.split(each[name].values, 2)[half] for each in parts])
            for name in ("inputs", "theta")
        }
        for half in range(2)
    )
    n_queries = parts[0].sizes["query"]
    swapped = other["inputs"].copy()
    swapped[:, -n_queries:] = own["inputs"][:, -n_queries:]
    return own["inputs"].astype(float), swapped.astype(float), own["theta"], other["theta"]


def by_hand(toy, seed, inputs, swapped):
    """Return ŷ_own, ŷ_donor and ŷ_ℓ, one prompt at a time in float64."""
    model = toy.model.hooked(toy.task, pooled_toy.weights_at(toy.trajectory, seed))
    n_layers = toy.model.n_layers
    plain, donor = (np.empty((len(inputs), toy.task.n_queries)) for _ in range(2))
    patched = np.empty((n_layers, *plain.shape))
    with torch.no_grad(), one_thread_an_operation():
        for number, pair in enumerate(zip(inputs, swapped, strict=True)):
            own, other = (torch.from_numpy(each[None]) for each in pair)
            plain[number] = model(own)[0].numpy()
            output, cache = model.run_with_cache(other)
            donor[number] = output[0].numpy()
            for layer in range(n_layers):
                name = f"blocks.{layer}.hook_workspace"
                hook = (name, lambda value, hook, name=name, cache=cache: cache[name])
                patched[layer, number] = model.run_with_hooks(own, fwd_hooks=[hook])[0].numpy()
    return plain, donor, patched


@pytest.mark.parametrize("task", [TREE, pooled_toy.gaussian()], ids=["tree", "gaussian"])
@pytest.mark.parametrize("kind", ["A", "B", "between"])
def test_one_prompt_at_a_time_by_hand(task, kind, monkeypatch):
    monkeypatch.setattr(transplants, "AT_ONCE", 1000)  # several parts
    made = pooled_toy.model(kind) if kind != "between" else pooled_toy.model("A", 2, n_channels=2)
    toy = pooled_toy.random(task, made, n_seeds=2)
    forward = toy.forward()
    result = PROBE(toy.trajectory, forward, n_prompts=30, evaluation_seed=3)
    inputs, swapped, theta, other = pairs_of(forward, 30, 3)
    queries = inputs[:, -task.n_queries :, :-1]
    own_target, other_target = (np.einsum("pqk,pk->pq", queries, each) for each in (theta, other))
    for seed in range(2):
        plain, donor, patched = by_hand(toy, seed, inputs, swapped)
        one = result.isel(seed=seed, step=0)
        along, whole = (patched - plain) * (donor - plain), (donor - plain) ** 2
        np.testing.assert_allclose(
            one["follows"], along.sum((-2, -1)) / whole.sum(), rtol=1e-9, atol=1e-12
        )
        for name, error, squares in (
            ("distance_to_donor", "distance_error", (patched - donor) ** 2),
            ("donor_loss", "donor_loss_error", (patched - other_target) ** 2),
            ("own_loss", "own_loss_error", (patched - own_target) ** 2),
            ("clean_loss", "clean_error", (plain - own_target) ** 2),
            ("foreign_loss", "foreign_error", (plain - other_target) ** 2),
        ):
            each = squares.mean(-1)
            np.testing.assert_allclose(one[name], each.mean(-1), rtol=1e-9, atol=1e-13)
            expected = each.std(-1, ddof=1) / 30**0.5
            np.testing.assert_allclose(one[error], expected, rtol=1e-9, atol=1e-13)
        np.testing.assert_allclose(one["separation"], whole.mean(), rtol=1e-9)
        middle = ((plain - own_target) ** 2 + (plain - other_target) ** 2).mean(-1) / 2
        gain = middle - ((patched[-1] - other_target) ** 2).mean(-1)
        np.testing.assert_allclose(one["gain"], gain.mean(), rtol=1e-9)
        np.testing.assert_allclose(one["gain_error"], gain.std(ddof=1) / 30**0.5, rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["A", "B"])
def test_identities_are_exact_and_an_untrained_model_is_of_no_use(kind, dtype, monkeypatch):
    monkeypatch.setattr(transplants, "AT_ONCE", 3000)
    toy = pooled_toy.random(TREE, pooled_toy.model(kind), n_seeds=3, scale=1.0)
    trajectory = toy.trajectory.astype(dtype)
    for name, value in toy.trajectory.items():
        trajectory[name].attrs = value.attrs
    result = PROBE(trajectory, toy.forward(), n_prompts=101)
    last = result.isel(layer=-1)
    np.testing.assert_array_equal(result["self_change"], 0)
    np.testing.assert_array_equal(last["follows"], 1)
    np.testing.assert_array_equal(last["follows_error"], 0)
    np.testing.assert_array_equal(last["distance_to_donor"], 0)
    np.testing.assert_array_equal(last["follows"], result["last_follows"])
    np.testing.assert_array_equal(result["holds"], 0)
    assert (result["separation"] > 0).all()
    if kind == "A":
        assert (abs(result["follows"].isel(layer=0) - 1) > 1e-3).all()


def test_the_error_of_following_is_that_of_repeated_sets_of_pairs():
    toy = pooled_toy.random(TREE, pooled_toy.model("A"), n_seeds=1)
    forward = toy.forward()
    found = [
        PROBE(toy.trajectory, forward, n_prompts=60, evaluation_seed=seed) for seed in range(20)
    ]
    values, errors = (
        np.array([each[name][0, 0, :2] for each in found]) for name in ("follows", "follows_error")
    )
    # The spread of 20 has a standard error of 16 %.
    np.testing.assert_allclose(values.std(0, ddof=1), errors.mean(0), rtol=0.5)


def test_a_layer_that_writes_nothing_has_nothing_to_transplant():
    """The workspace after it is ε for every context: nothing moves, though later layers measure."""
    toy = pooled_toy.random(TREE, pooled_toy.model("A"), n_seeds=2)
    trajectory = toy.trajectory.copy(deep=True)
    trajectory["W_O"].values[:, :, 0] = 0.0
    result = PROBE(trajectory, toy.forward(), n_prompts=40)
    np.testing.assert_array_equal(result["follows"].isel(layer=0), 0)
    np.testing.assert_array_equal(result["own_loss"].isel(layer=0), result["clean_loss"])
    np.testing.assert_array_equal(result["donor_loss"].isel(layer=0), result["foreign_loss"])
    np.testing.assert_array_equal(result["distance_to_donor"].isel(layer=0), result["separation"])
    assert (abs(result["follows"].isel(layer=1)) > 0).all()


def test_a_model_that_follows_the_tree():
    """Leaves of unit length, independent in a pair: |θ − θ'|² is 2 on average."""
    task = pooled_toy.tree(tau=1e-3, n_context=100_000)
    toy = pooled_toy.following(task)
    result = PROBE(toy.trajectory, transplant_toy.reading(task), n_prompts=800)[
        dict(seed=0, step=0)
    ]
    assert result["clean_loss"] < 1e-9
    assert abs(result["foreign_loss"] - 2) < 4 * result["foreign_error"]
    assert abs(result["gain"] - 1) < 4 * result["gain_error"]
    assert result["donor_loss"][-1] < 1e-9
    np.testing.assert_allclose(result["own_loss"][-1], result["foreign_loss"], rtol=0.2)
    assert result["holds"] == 1 and result["since"] == 0
    # Without the first spin the queries are half of the time on the wrong side of the root.
    assert (np.diff(result["follows"]) > 0.05).all() and result["follows"][0] > 0.3


def test_models_that_read_nothing_of_the_context():
    toy = pooled_toy.random(TREE, pooled_toy.model("A"), n_seeds=2)
    trajectory = toy.trajectory.copy(deep=True)
    trajectory["W_U"].values[1] = 0.0
    result = PROBE(trajectory, toy.forward(), n_prompts=20)
    assert counts(result)["donor_predicts_the_same"] == 1
    assert result["follows"][1].isnull().all() and result["last_follows"][1].isnull()
    assert result["donor_loss"].notnull().all() and result["holds"].notnull().all()
    np.testing.assert_array_equal(result["separation"][1], 0)
    plots.draw(result)


def test_diverged_seeds_and_predictions_that_overflow():
    toy = pooled_toy.random(TREE, pooled_toy.model("A"), n_seeds=3, n_steps=2)
    trajectory = pooled_toy.poison(toy.trajectory, seed=1, from_index=1)
    trajectory["W_U"].values[2, 1] = 1e200
    result = PROBE(trajectory, toy.forward(), n_prompts=20)
    expected = {"nonfinite_parameters": 1, "nonfinite_predictions": 1, "donor_predicts_the_same": 0}
    assert counts(result) == expected
    np.testing.assert_array_equal(result["undefined"], [[0, 0], [0, 1], [0, 2]])
    alone = PROBE(toy.trajectory.isel(seed=[0]), toy.forward(), n_prompts=20)
    np.testing.assert_array_equal(result["follows"][0], alone["follows"][0])


def test_runs_without_a_workspace():
    toy = pooled_toy.random(TREE, pooled_toy.model("C"))
    with pytest.raises(NothingToAnalyseError, match="a model without MLPs has none"):
        PROBE(toy.trajectory, toy.forward())
    assert "the run has no" in str(PROBE.objection(trajectories.from_scales([0.1], [1.0])))


def test_a_forward_without_latents_or_hooks_is_refused():
    toy = pooled_toy.random(TREE, pooled_toy.model("A"))
    for field, match in (("sample", "reads latents"), ("hooked", "hooks into the model")):
        less = analyses.Forward(**{**vars(toy.forward()), field: None})
        with pytest.raises(InputError, match=match):
            PROBE(toy.trajectory, less, n_prompts=4)


@pytest.mark.parametrize("settings", [{"n_prompts": 1}, {"n_queries": 0}, {"margin": -1}])
def test_wrong_settings_are_refused(settings):
    toy = pooled_toy.random(TREE, pooled_toy.model("A"))
    with pytest.raises(InputError, match=next(iter(settings))):
        PROBE(toy.trajectory, toy.forward(), **settings)
