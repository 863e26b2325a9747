import json

import numpy as np
import pytest
import torch

from mechicl import analyses, plots
from mechicl.analyses import Forward, pooled
from mechicl.analyses.pooled import dynamic_keys, samples
from mechicl.analyses.routing import Tally, measured
from mechicl.errors import InputError
from mechicl.theory import priors
from tests import trajectories
from tests.analyses import pooled_toy

PROBE = analyses.get("routing")
DEPTH = 4
EACH = 25
"""Contexts of every leaf."""
LEAF = np.repeat(np.arange(2**DEPTH), EACH)
N = len(LEAF)
MEASURED = ("on_path", "level", "variation", "explained", "sign_effect")


def tallied(w: np.ndarray, leaf: np.ndarray = LEAF, depth: int = DEPTH) -> dict[str, np.ndarray]:
    tally = Tally(depth)
    tally.add(w, leaf)
    return tally.measure()


def on_the_path(leaf: np.ndarray, depth: int) -> np.ndarray:
    """Return w = e_v, v the node of layer m on the way to the leaf, (batch, layer, 1, node)."""
    w = np.zeros((len(leaf), depth, 1, 2**depth - 1))
    for m in range(depth):
        w[np.arange(len(leaf)), m, 0, 2**m - 1 + (leaf >> (depth - m))] = 1.0
    return w


def test_a_path_in_closed_form() -> None:
    found = tallied(on_the_path(LEAF, DEPTH))
    np.testing.assert_array_equal(found["on_path"][:, 0], np.eye(DEPTH))
    np.testing.assert_array_equal(found["level"][:, 0], np.eye(DEPTH))
    np.testing.assert_array_equal(found["measured_depth"][:, 0], range(DEPTH))
    levels = np.arange(DEPTH)
    np.testing.assert_allclose(found["variation"][:, 0], 1 - 0.5**levels, atol=1e-14)
    np.testing.assert_allclose(found["sign_effect"][:, 0], levels > 0, atol=1e-14)
    for m in levels[1:]:
        # Within a group of s_1 … s_j, w is on one of 2^(m − j) nodes, as often on each.
        within = np.maximum(1 - 2.0 ** (levels - m), 0) * N / (N - 2**levels)
        expected = (1 - 0.5**m) * (1 - within / ((1 - 0.5**m) * N / (N - 1)))
        np.testing.assert_allclose(found["explained"][m, 0], expected, atol=1e-13)
    assert (found["explained"][0] == 0).all()


def test_symmetric_axes_are_on_every_path_a_little() -> None:
    axes = priors.symmetric_axes(DEPTH)[:, None]
    found = tallied(np.broadcast_to(3 * axes, (N, *axes.shape)))
    levels = np.arange(DEPTH)
    np.testing.assert_allclose(found["on_path"][:, 0], np.diag(0.5**levels), atol=1e-15)
    np.testing.assert_allclose(found["level"][:, 0], np.eye(DEPTH), atol=1e-15)
    np.testing.assert_array_equal(found["measured_depth"][:, 0], levels)
    for name in ("variation", "explained"):
        assert (found[name] == 0).all()
    np.testing.assert_allclose(found["sign_effect"], 0, atol=1e-14)


def test_a_key_without_regard_to_the_leaf_routes_nothing() -> None:
    rng = np.random.default_rng(0)
    n_channels, nodes = 200, 2**DEPTH - 1
    leaf = np.repeat(np.arange(2**DEPTH), 4)
    w = rng.normal(size=(len(leaf), 2, n_channels, nodes))
    w[:, 0, 0] = np.eye(nodes)[0]  # what the layer before measures: the root
    mean = rng.normal(size=(n_channels, nodes))  # about which it varies
    w[:, 1] += nodes**0.5 * mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    found = {name: value[1] for name, value in tallied(w, leaf).items()}
    np.testing.assert_allclose(found["on_path"].mean(0), 1 / nodes, atol=0.005)
    assert found["variation"].mean() == pytest.approx(0.5, abs=0.01)
    # Without the correction for groups it would be (2^m − 1)/(n − 1) of `variation`: 0.06 at last.
    bound = 5 * found["explained"].std(0) / np.sqrt(n_channels)
    assert (abs(found["explained"].mean(0)) <= bound).all()
    assert bound.max() < 0.01
    # ... and here 1/(1 + 32), from the noise of two means of 32 contexts each.
    assert abs(found["sign_effect"].mean()) < 0.01


def test_the_sign_read_before_is_the_one_that_counts() -> None:
    """Layer 1 follows s_1 or s_2, where layer 0 has measured the root: s_1."""
    for spin, expected in ((0, 1.0), (1, 0.0)):
        w = np.zeros((N, 2, 1, 2**DEPTH - 1))
        w[:, 0, 0, 0] = 1.0
        w[np.arange(N), 1, 0, 1 + ((LEAF >> (DEPTH - 1 - spin)) & 1)] = 1.0
        found = tallied(w)
        assert found["sign_effect"][1, 0] == pytest.approx(expected, abs=1e-13)
        explained = found["explained"][1, 0]
        np.testing.assert_allclose(explained > 0.2, np.arange(DEPTH) > spin)


def test_parts_are_the_whole() -> None:
    rng = np.random.default_rng(1)
    w, order = rng.normal(size=(N, 3, 2, 2**DEPTH - 1)), rng.permutation(N)
    whole, parts = Tally(DEPTH), Tally(DEPTH)
    whole.add(w, LEAF)
    for part in np.array_split(order, 7):
        parts.add(w[part], LEAF[part])
    for name, value in whole.measure().items():
        np.testing.assert_allclose(parts.measure()[name], value, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_model_that_follows_the_tree(depth: int) -> None:
    task = pooled_toy.tree(
        prior={"kind": "tree", "depth": depth}, n_context=4096, tau=0.01, n_queries=1
    )
    toy = pooled_toy.following(task)
    result = PROBE(toy.trajectory, toy.forward(), n_prompts=300).isel(seed=0, step=0, channel=0)
    # A key that has mean 0: w = e_v − 1/(K + 1) on K nodes.
    k = 2**depth - 1
    norm = k * k + k - 1
    own = np.eye(depth, dtype=bool)
    np.testing.assert_allclose(result["on_path"], np.where(own, k * k, 1) / norm, rtol=1e-3)
    expected = np.where(own, k * k - 1, 0) + 2.0 ** np.arange(depth)
    np.testing.assert_allclose(result["level"], expected / norm, rtol=1e-3)
    np.testing.assert_array_equal(result["measured_depth"], range(depth))
    effect = 1 - (k - 2 * (k + 1)) / norm
    np.testing.assert_allclose(result["sign_effect"], [0] + [effect] * (depth - 1), rtol=1e-3)
    assert result["holds"] == 1
    assert result["routed"] == result["explained"][1:, -1].min() > 0.3
    assert result["routed_layers"] == depth - 1
    assert (result["variation"][0], result["explained"][0, -1]) == (0, 0)


def test_w_is_the_coefficient_of_theta() -> None:
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("A"))
    sample = toy.task.sample(20, seed=0)
    weights = pooled_toy.weights_at(toy.trajectory)
    given = {name: value.numpy() for name, value in weights.items()}
    keys = dynamic_keys(toy.forward(), given, sample["inputs"].values)
    w = measured(keys, given["W_V"])
    moments = toy.task.moments(sample["inputs"].values)
    values = np.broadcast_to(given["W_V"], keys.shape)
    rest = np.einsum("blci,bij,blcj->blc", keys[..., :-1], moments[:, :-1, :-1], values[..., :-1])
    rest += keys[..., -1] * values[..., -1] * moments[:, -1, -1][:, None, None]
    expected = rest + np.einsum("blci,bi->blc", w, moments[:, :-1, -1])
    model = toy.model.hooked(toy.task, weights)
    _, cache = model.run_with_cache(torch.from_numpy(sample["inputs"].values).double())
    found = np.stack([cache[f"blocks.{layer}.attn.hook_phi"] for layer in range(3)], 1)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_one_layer_has_nothing_to_route_by() -> None:
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("B"))
    result = PROBE(toy.trajectory, toy.forward(), n_prompts=100)
    for name in ("variation", "explained", "sign_effect"):
        assert (result[name] == 0).all()
    assert result["holds"].isnull().all()
    assert result["routed"].isnull().all()
    assert result["routed_layers"].isnull().all()
    assert json.loads(result.attrs["n_undefined"])["one_layer"] == 2
    assert result["on_path"].notnull().all()
    np.testing.assert_allclose(result["level"].sum("node_depth"), 1)
    plots.draw(result)


def test_signs_and_order_of_channels_do_not_matter() -> None:
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("A", 2, n_channels=3))
    result = PROBE(toy.trajectory, toy.forward(), n_prompts=200)
    assert (
        float(result["variation"][:, :, 0].max()) == 0 < float(result["variation"][:, :, 1].min())
    )
    turned = toy.trajectory.assign(W_V=-toy.trajectory["W_V"], W_O=-toy.trajectory["W_O"])
    order = [2, 0, 1]
    permuted = toy.trajectory.isel(channel=order)
    for other, expected in ((turned, result), (permuted, result.isel(channel=order))):
        again = PROBE(other, toy.forward(), n_prompts=200)
        for name in (*MEASURED, "routed", "measured_depth"):
            np.testing.assert_allclose(again[name], expected[name], rtol=1e-9, atol=1e-12)


def test_undefined() -> None:
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("A"), n_seeds=4)
    trajectory = pooled_toy.poison(toy.trajectory, seed=1, from_index=0)
    trajectory["W_V"].values[2, 0, 1] = 0.0  # a layer that reads nothing
    trajectory["b_out"].values[3, 0, 0] = 1e200  # finite, and a square that is not
    with np.errstate(over="ignore"):
        result = PROBE(trajectory, toy.forward(), n_prompts=100)
    counts = json.loads(result.attrs["n_undefined"])
    assert counts["nonfinite_parameters"] == 1
    assert counts["zero_measurement"] == 1
    assert counts["nonfinite_keys"] == 1
    assert result["on_path"].isel(seed=2, layer=1).isnull().all()
    assert result["on_path"].isel(seed=2, layer=0).notnull().all()
    assert result["holds"].isel(seed=0).notnull().all()
    assert result["holds"].isel(seed=[1, 2, 3]).isnull().all()
    few = PROBE(toy.trajectory, toy.forward(), n_prompts=2)
    assert json.loads(few.attrs["n_undefined"])["too_few_contexts"] == 4
    assert few["on_path"].notnull().all()


@pytest.mark.parametrize(
    ("task", "kind", "reason"),
    [
        (pooled_toy.tree(), "C", "without feedforward"),
        (pooled_toy.gaussian(), "A", "another prior"),
    ],
)
def test_runs_without_anything_to_route(task, kind, reason) -> None:
    toy = pooled_toy.random(task, pooled_toy.model(kind))
    assert reason in str(PROBE.objection(toy.trajectory))
    assert "the run has no" in str(PROBE.objection(trajectories.from_scales(0.1, 1.0)))


def test_prompts_come_in_parts_that_memory_holds(monkeypatch) -> None:
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("A"))
    forward, sizes = toy.forward(), []
    each = toy.task.n_positions * toy.task.d_model
    monkeypatch.setattr(pooled, "_NUMBERS", 30 * each + 1)
    drawn = [part["theta"].values for part in samples(forward, 70, 0)]
    sizes = [len(part) for part in drawn]
    assert sizes == [30, 30, 10]
    assert not np.array_equal(drawn[0], drawn[1])


def test_a_forward_that_lacks_what_is_asked_for_says_so() -> None:
    toy = pooled_toy.random(pooled_toy.tree(), pooled_toy.model("A"))
    made = toy.forward()
    with pytest.raises(InputError, match="no `sample`"):
        PROBE(toy.trajectory, Forward(made.predict, made.prompts, made.references))
    bare = Forward(made.predict, made.prompts, made.references, sample=made.sample)
    with pytest.raises(InputError, match="no `hooked`"):
        PROBE(toy.trajectory, bare)
