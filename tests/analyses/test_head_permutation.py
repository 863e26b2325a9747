import json

import numpy as np
import pytest
import xarray as xr

from mechicl import analyses
from mechicl.analyses.spans import aligned
from mechicl.errors import NothingToAnalyseError
from tests import trajectories
from tests.analyses import markov_toy
from tests.analyses.markov_toy import Toy, chain, on_blocks
from tests.trajectories import permuted

PROBE = analyses.get("head_permutation")


def measure(toy: Toy, **settings: object) -> xr.Dataset:
    return PROBE(toy.trajectory, toy.forward(), **settings)


def counts(result: xr.Dataset) -> dict[str, int]:
    return json.loads(result.attrs["n_undefined"])


def ending(mass: object) -> Toy:
    """Return a run of two steps whose heads end with these masses (seed, head, block)."""
    mass = np.asarray(mass, dtype=float)
    task = chain() if mass.shape[-1] == 2 else chain(blocks=((0,), (1,), (2,)))
    even = np.full_like(mass, 1 / mass.shape[-1])
    return markov_toy.sparse(task, on_blocks(task, np.stack([even, mass], 1)))


def test_heads_are_in_the_order_of_the_blocks_they_serve():
    result = measure(markov_toy.learning(3))
    # Seed s has its heads turned by s.
    np.testing.assert_array_equal(result["permutation"][:, 0], [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
    np.testing.assert_allclose(result["margin"], 2 * 0.85, atol=1e-6)
    np.testing.assert_allclose(result["least_margin"][:, 0], 2 * 0.85, atol=1e-6)
    assert result["step"].values.tolist() == [1500]
    assert set(counts(result).values()) == {0}


def test_alignment_undoes_any_order_of_the_heads():
    """Parameters with their heads in another order are the same after alignment, bit for bit."""
    toy = markov_toy.learning(2)
    parameters = toy.trajectory[["KQ", "OV"]]
    want = aligned(parameters, measure(toy)["permutation"])
    assert not want.equals(parameters)
    for order in ([1, 2, 0], [2, 1, 0], [0, 2, 1]):
        shuffled = permuted(toy.trajectory, "head", order)
        result = PROBE(shuffled, toy.forward())
        assert not shuffled["OV"].equals(parameters["OV"])
        xr.testing.assert_identical(aligned(shuffled[["KQ", "OV"]], result["permutation"]), want)
        xr.testing.assert_identical(
            result["permutation"], permuted(measure(toy)["permutation"], "head", order)
        )
        np.testing.assert_array_equal(result["margin"], measure(toy)["margin"])
        # What a probe says of the shuffled run comes out in the same order too.
        value = analyses.get("value_alignment")
        xr.testing.assert_equal(
            aligned(value(shuffled)[["cosine"]], result["permutation"]),
            aligned(value(toy.trajectory)[["cosine"]], measure(toy)["permutation"]),
        )


def test_aligned_heads_make_the_same_model():
    toy = markov_toy.learning(2)
    forward = toy.forward()
    inputs, _ = forward.prompts(5, 0)
    moved = aligned(toy.trajectory[["KQ", "OV"]], measure(toy)["permutation"])
    one, other = (
        forward.predict({name: run[name].values for name in ("KQ", "OV")}, inputs)
        for run in (toy.trajectory, moved)
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_decoders_are_ordered_with_what_monte_carlo_gives():
    by_lag = on_blocks(chain(), [[[[0.1, 0.9], [0.8, 0.2]]]])
    toy = markov_toy.decoder(chain(), by_lag, token_scores=0.3)
    result = measure(toy, n_prompts=50)
    np.testing.assert_array_equal(result["permutation"][0, 0], [1, 0])
    spans = analyses.get("attention_spans")(
        toy.trajectory, toy.forward(), n_prompts=50, evaluation_seed=3
    )
    xr.testing.assert_equal(measure(toy, n_prompts=50, evaluation_seed=3)["mass"], spans["mass"])
    assert not measure(toy, n_prompts=50)["mass"].equals(spans["mass"])


def test_more_heads_than_blocks():
    toy = ending([[[0.3, 0.7], [0.1, 0.9], [0.8, 0.2], [0.9, 0.1], [0.6, 0.4]]])
    result = measure(toy)
    np.testing.assert_array_equal(result["permutation"][0, 0], [4, 1, 2, 0, 3])
    np.testing.assert_allclose(result["margin"], 0.1, atol=1e-6)


def test_heads_that_are_alike_are_tied():
    """As at u = 0: all heads have one pattern, whatever it is."""
    result = measure(ending([[[0.9, 0.1], [0.9, 0.1]], [[0.9, 0.1], [0.2, 0.8]]]))
    assert result["permutation"][0].isnull().all() and result["permutation"][1].notnull().all()
    np.testing.assert_allclose(result["margin"][:, 0], [0.0, 1.4], atol=1e-6)
    np.testing.assert_allclose(result["least_margin"][:, 0], [np.nan, 1.4], atol=1e-6)
    assert counts(result)["tied_heads"] == 1
    near = ending([[[0.9, 0.1], [0.899, 0.101]]])
    assert measure(near)["permutation"].notnull().all()
    assert counts(measure(near, tie_tolerance=0.01))["tied_heads"] == 1
    np.testing.assert_allclose(measure(near, tie_tolerance=0.01)["margin"], 0.002, atol=1e-6)


def test_a_single_head_needs_no_order():
    result = measure(ending([[[0.5, 0.5]]]))
    assert result["permutation"].item() == 0
    assert result["margin"].isnull().all() and result["least_margin"].isnull().all()
    assert counts(result)["single_head"] == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_diverged_seed_has_no_order(value):
    toy = markov_toy.learning(2)
    early = markov_toy.poison(toy.trajectory, seed=0, from_index=2, value=value)
    result = PROBE(early, toy.forward())
    assert result["permutation"][0].isnull().all() and result["margin"][0].isnull().all()
    np.testing.assert_array_equal(result["permutation"][1, 0], [2, 0, 1])
    assert counts(result)["nonfinite_parameters"] == 1
    assert aligned(early[["OV"]], result["permutation"])["OV"][0].isnull().all()


def test_it_is_the_last_step_that_decides():
    toy = markov_toy.learning(1)
    before = PROBE(toy.trajectory.isel(step=slice(3)), toy.forward())
    assert counts(before)["tied_heads"] == 1
    assert before["step"].values.tolist() == [100]


def test_regression_runs_are_refused():
    with pytest.raises(NothingToAnalyseError, match="no lag_weights"):
        PROBE(trajectories.learning(), markov_toy.forward64())
