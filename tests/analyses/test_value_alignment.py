import json

import numpy as np
import pytest
import xarray as xr

from mechicl import analyses
from mechicl.analyses.value_alignment import value_maps
from mechicl.errors import NothingToAnalyseError
from mechicl.models.decoder import Decoder
from mechicl.tasks.streams import generator
from tests import trajectories
from tests.analyses import markov_toy
from tests.analyses.markov_toy import chain, on_blocks

PROBE = analyses.get("value_alignment")
TASK = chain(d=5, blocks=((0, 1), (2, 3)), importance=1.5)
ONE, TWO = TASK.features
EVEN = np.full((1, 1, 2, 4), 0.25)


def of_maps(maps: object, kind: str = "sparse", task=TASK) -> xr.Dataset:
    """Return a run of two heads with these value maps (head, next_state, state)."""
    maps = np.asarray(maps, dtype=float)
    even = np.full((1, 1, len(maps), 4), 0.25)
    return getattr(markov_toy, kind)(task, even, maps[None, None]).trajectory


def measure(maps: object, kind: str = "sparse", **settings: object) -> xr.Dataset:
    result = PROBE(of_maps(maps, kind), **settings)
    return result.isel(seed=0, step=0, layer=0)


def counts(result: xr.Dataset) -> dict[str, int]:
    return json.loads(result.attrs["n_undefined"])


@pytest.mark.parametrize("kind", ["sparse", "decoder"])
def test_a_multiple_of_a_feature(kind):
    result = measure([0.5 * ONE, -2.0 * TWO], kind)
    np.testing.assert_allclose(np.diag(result["cosine"]), [1.0, -1.0], rtol=1e-12)
    np.testing.assert_allclose(np.diag(result["projection"]), [0.5, -2.0], rtol=1e-12)
    assert result["n_aligned"].item() == 1 and result["holds"].item() == 0
    assert measure([0.5 * ONE, 2.0 * TWO], kind)["holds"].item() == 1


@pytest.mark.parametrize("kind", ["sparse", "decoder"])
def test_equal_to_the_definition_written_out(kind):
    maps = np.random.default_rng(0).normal(size=(2, 5, 5))
    result = measure(maps, kind)
    for head, block in np.ndindex(2, 2):
        m, a = maps[head] - maps[head].mean(0), TASK.features[block] - TASK.features[block].mean(0)
        inner = np.trace(m.T @ a)
        assert result["cosine"].values[head, block] == pytest.approx(
            inner / np.linalg.norm(m) / np.linalg.norm(a), rel=1e-12
        )
        assert result["projection"].values[head, block] == pytest.approx(
            inner / np.linalg.norm(a) ** 2, rel=1e-12
        )
    np.testing.assert_allclose(result["total_projection"], result["projection"].sum("head"))


def test_maps_that_were_drawn_are_aligned_with_nothing():
    task = chain(d=20)
    drawn_maps = 100 * np.random.default_rng(99).normal(size=(2, 20, 20))
    result = PROBE(of_maps(drawn_maps, task=task))
    assert float(abs(result["cosine"]).max()) < 0.2
    assert result["n_aligned"].item() == 0 and result["holds"].item() == 0


def test_a_constant_of_every_input_token_changes_nothing():
    maps = np.random.default_rng(0).normal(size=(2, 5, 5))
    shift = np.random.default_rng(1).normal(size=(2, 1, 5))
    xr.testing.assert_allclose(measure(maps + shift), measure(maps), rtol=1e-10)
    features = of_maps(maps)
    features["features"].values[...] += shift
    xr.testing.assert_allclose(
        PROBE(features).isel(seed=0, step=0, layer=0), measure(maps), rtol=1e-10
    )
    # Negative control: what every token adds alike to one logit counts.
    bias = np.swapaxes(shift, -1, -2)
    assert float(abs(measure(maps + bias)["cosine"] - measure(maps)["cosine"]).max()) > 0.05


def test_a_bias_that_heads_trade_costs_one_part_in_d():
    """Orthogonal features have about 1/d of their square in what all input tokens share."""
    task = chain(d=20, orthogonal_features=True)
    without = task.features - task.features.mean(-1, keepdims=True)
    result = PROBE(of_maps(without, task=task)).isel(seed=0, step=0, layer=0)
    centred = task.features - task.features.mean(1, keepdims=True)
    shared = (centred.mean(-1) ** 2).sum(-1) * 20 / (centred**2).sum((1, 2))
    np.testing.assert_allclose(shared, 1 / 20, rtol=0.5)
    np.testing.assert_allclose(np.diag(result["projection"]), 1 - shared, rtol=1e-10)
    np.testing.assert_allclose(np.diag(result["cosine"]), np.sqrt(1 - shared), rtol=1e-10)


def test_heads_that_share_a_feature_add_up():
    result = measure([0.4 * ONE, 0.6 * ONE + 0.3 * TWO])
    orthogonal = measure([0.4 * ONE, 0.6 * ONE])
    np.testing.assert_allclose(orthogonal["cosine"].sel(block=1), 1.0, rtol=1e-12)
    assert orthogonal["total_projection"].sel(block=1).item() == pytest.approx(1.0)
    assert 0.5 < result["cosine"].values[1, 0] < 1


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_heads_that_predict_as_the_chain_have_projections_of_1(temperature):
    """Features and value maps are both tau times logits: the chain's own model shows it."""
    task = chain(d=5, temperature=temperature)
    toy = markov_toy.sparse(task, on_blocks(task, [[np.eye(2)]]), task.features)
    forward = toy.forward()
    inputs, _ = forward.prompts(50, 0)
    parameters = {name: toy.trajectory[name].values for name in ("KQ", "OV")}
    logits = forward.predict(parameters, inputs)[0, 0].astype(float)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logits, task.references(inputs)["generator"], atol=1e-4)
    result = PROBE(toy.trajectory).isel(seed=0, step=0, layer=0)
    np.testing.assert_allclose(np.diag(result["projection"]), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.diag(result["cosine"]), 1.0, rtol=1e-12)


def drawn(n_layers: int = 2) -> xr.Dataset:
    model = Decoder(n_layers=n_layers, n_heads=2, d_head=4, d_mlp=3)
    initial = model.initial(TASK, generator("test", 0))
    values = {name: value.numpy()[None, None] for name, value in initial.items()}
    return markov_toy.toy(TASK, model, values).trajectory


def test_the_direct_path_of_a_decoder():
    trajectory = drawn()
    maps = value_maps(trajectory)
    assert maps.sizes["layer"] == 2
    one = {name: trajectory[name].values[0, 0] for name in ("W_E", "W_V", "W_O", "W_U")}
    for layer, head in np.ndindex(2, 2):
        for state in range(5):
            written = one["W_E"][state] @ one["W_V"][layer, head] @ one["W_O"][layer, head]
            np.testing.assert_allclose(
                maps.isel(seed=0, step=0, layer=layer, head=head, state=state),
                written @ one["W_U"],
                rtol=1e-10,
            )


def test_a_basis_inside_a_head_does_not_matter():
    trajectory = drawn()
    turned = trajectory.copy(deep=True)
    basis = np.random.default_rng(0).normal(size=(4, 4))
    turned["W_V"].values[...] = trajectory["W_V"].values @ basis
    turned["W_O"].values[...] = np.linalg.inv(basis) @ trajectory["W_O"].values
    xr.testing.assert_allclose(PROBE(turned), PROBE(trajectory), rtol=1e-8)
    turned["W_V"].values[...] = trajectory["W_V"].values @ basis @ basis
    assert not np.allclose(PROBE(turned)["cosine"], PROBE(trajectory)["cosine"])


def test_positions_that_values_read_are_left_out():
    trajectory = of_maps([ONE, TWO])
    ov = trajectory["OV"].values
    wide = trajectory.drop_vars("OV").assign(
        OV=(trajectory["OV"].dims, np.append(ov, np.ones_like(ov), -1), trajectory["OV"].attrs)
    )
    xr.testing.assert_identical(PROBE(wide), PROBE(trajectory))


def test_a_map_of_zeros_has_no_cosine_and_a_projection_of_0():
    constant = np.ones((5, 1)) * np.random.default_rng(0).normal(size=5)
    rounded = (constant * (1 + 1e-8 * np.random.default_rng(1).normal(size=(5, 5)))).astype("f4")
    assert (rounded != rounded[0]).any()
    for nothing in (np.zeros((5, 5)), constant, rounded):
        result = PROBE(of_maps([nothing, ONE]))
        assert counts(result)["zero_value_map"] == 1
        one = result.isel(seed=0, step=0, layer=0)
        assert one["cosine"][0].isnull().all() and one["cosine"][1].notnull().all()
        np.testing.assert_allclose(one["projection"][0], 0.0, atol=1e-7)
        assert one["total_projection"].sel(block=1).item() == pytest.approx(1.0)
        assert one["n_aligned"].item() == 1 and one["holds"].item() == 0
    assert counts(PROBE(of_maps([1e-30 * ONE, 1e-30 * ONE])))["zero_value_map"] == 0


def test_a_feature_that_says_nothing_has_no_values():
    trajectory = of_maps([ONE, TWO])
    trajectory["features"].values[1] = 0.3  # every next state alike
    result = PROBE(trajectory)
    for name in ("cosine", "projection", "total_projection"):
        assert result[name].sel(block=2).isnull().all()
        assert result[name].sel(block=1).notnull().all()
    assert counts(result)["zero_feature"] == 1
    assert result["n_aligned"].item() == 1 and result["holds"].item() == 0


def test_stages():
    result = PROBE(markov_toy.learning(2).trajectory)
    np.testing.assert_array_equal(result["n_aligned"], [[0, 1, 1, 1, 2, 2, 3]] * 2)
    np.testing.assert_array_equal(result["since"], [1500, 1500])
    assert counts(result)["zero_value_map"] == 2
    # In the competitive phase three heads share A*_1, a third each.
    shared = result["projection"].sel(step=100, block=1).isel(layer=0)
    np.testing.assert_allclose(shared, 1 / 3, atol=0.05)
    strict = PROBE(markov_toy.learning(1).trajectory, align_threshold=0.999)
    assert strict["n_aligned"].values[0, 1] == 0


@pytest.mark.parametrize("kind", ["sparse", "decoder"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_diverged_seed_is_undefined(kind, value):
    maps = np.broadcast_to(TASK.features, (2, 3, 2, 5, 5))
    even = np.full((2, 3, 2, 4), 0.25)
    trajectory = getattr(markov_toy, kind)(TASK, even, maps).trajectory
    result = PROBE(markov_toy.poison(trajectory, seed=1, from_index=2, value=value))
    for name in ("cosine", "projection", "total_projection", "n_aligned", "holds"):
        assert result[name][1, 2].isnull().all()
        assert result[name][1, :2].notnull().all() and result[name][0].notnull().all()
    assert counts(result)["nonfinite_parameters"] == 1
    np.testing.assert_array_equal(result["since"], [0, np.nan])


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (trajectories.learning(), "has no features"),
        (drawn().drop_vars("W_U"), "reads OV, or W_E, W_V, W_O, W_U, and the run has no W_U"),
        (of_maps([ONE, TWO]).drop_vars("OV"), "the run has no W_E, W_V, W_O, W_U"),
        (of_maps([ONE, TWO]).isel(d_in=slice(4)), "OV over d = 5 states, and here OV is 5×4"),
    ],
)
def test_what_has_no_value_maps_of_the_chain_is_refused(trajectory, message):
    with pytest.raises(NothingToAnalyseError, match=message):
        PROBE(trajectory)
