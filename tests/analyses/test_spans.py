"""The order of heads by brute force, and that alignment undoes what was done to heads."""

from itertools import permutations

import numpy as np
import pytest
import xarray as xr

from mechicl.analyses.spans import aligned, head_order, head_orders
from mechicl.errors import InputError


def by_brute_force(mass: np.ndarray) -> tuple[list[int], float]:
    """Return the head of every block, and what the next best choice loses, trying all choices."""
    n_heads, n_blocks = mass.shape
    choices = sorted(
        permutations(range(n_heads), n_blocks),
        key=lambda heads: -sum(mass[head, block] for block, head in enumerate(heads)),
    )
    sums = [sum(mass[h, b] for b, h in enumerate(heads)) for heads in choices[:2]]
    return list(choices[0]), sums[0] - sums[1]


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (5, 5), (4, 3), (6, 2), (3, 1)])
def test_blocks_get_the_heads_with_the_most_mass(shape):
    rng = np.random.default_rng(0)
    for _ in range(20):
        mass = rng.dirichlet(np.ones(shape[1] + 1), size=shape[0])[:, :-1]
        heads, difference = by_brute_force(mass)
        place, margin = head_order(mass)
        assert sorted(place) == list(range(shape[0]))
        assert [int(np.argsort(place)[block]) for block in range(shape[1])] == heads
        assert margin <= difference + 1e-12
        if shape[0] <= shape[1] + 1:  # one head left over at most: nothing else is ordered
            assert margin == pytest.approx(difference, abs=1e-12)


def test_the_best_assignment_is_not_the_greedy_one():
    """The head with the most on block 1 is needed for block 2, which the others do not look at."""
    place, margin = head_order(np.array([[0.5, 0.45], [0.45, 0.0]]))
    assert place.tolist() == [1, 0]
    assert margin == pytest.approx(0.9 - 0.5)


def test_heads_beyond_the_blocks_come_last_by_block_and_mass():
    mass = np.array([[0.1, 0.8], [0.7, 0.1], [0.1, 0.9], [0.9, 0.1], [0.8, 0.1]])
    place, margin = head_order(mass)
    # 3 serves block 1, 2 block 2; then 4 and 1 of block 1, and 0 of block 2.
    assert np.argsort(place).tolist() == [3, 2, 4, 1, 0]
    assert margin == pytest.approx(0.1)
    assert head_order(np.array([[0.9, 0.1], [0.1, 0.9], [0.4, 0.1], [0.39, 0.1]]))[
        1
    ] == pytest.approx(0.01)


def test_fewer_heads_than_blocks():
    place, margin = head_order(np.array([[0.0, 0.1, 0.9], [0.2, 0.7, 0.1]]))
    assert place.tolist() == [1, 0]
    assert margin == pytest.approx(1.6 - 1.1)


@pytest.mark.parametrize(
    "mass",
    [
        np.full((3, 3), 1 / 3),
        [[0.9, 0.1], [0.9, 0.1]],
        [[0.9, 0.1], [0.1, 0.9], [0.5, 0.2], [0.5, 0.3]],  # the two that are left over
    ],
)
def test_a_tie_has_no_margin(mass):
    assert head_order(np.array(mass))[1] == 0


def test_a_single_head_has_place_0_and_no_margin():
    place, margin = head_order(np.array([[0.2, 0.8]]))
    assert place.tolist() == [0]
    assert np.isnan(margin)


def test_orders_of_seeds_and_layers_are_apart():
    one, other = [[0.9, 0.1], [0.2, 0.8]], [[0.1, 0.9], [0.8, 0.2]]
    tied, gone = np.full((2, 2), 0.5), np.full((2, 2), np.nan)
    mass = xr.DataArray(
        [[one, other], [tied, one], [gone, other]],
        dims=("seed", "layer", "head", "block"),
        coords={"seed": [5, 6, 7]},
    )
    found = head_orders(mass, tie_tolerance=1e-6)
    nan = [np.nan, np.nan]
    np.testing.assert_array_equal(
        found["permutation"], [[[0, 1], [1, 0]], [nan, [0, 1]], [nan, [1, 0]]]
    )
    np.testing.assert_allclose(found["margin"], [[1.4, 1.4], [0, 1.4], [np.nan, 1.4]])
    assert found["seed"].values.tolist() == [5, 6, 7]
    assert head_orders(mass, tie_tolerance=0.99)["permutation"][0].notnull().all()
    # Transposing is no matter.
    xr.testing.assert_identical(found, head_orders(mass.T, tie_tolerance=1e-6))


def data(seeds: tuple[int, ...] = (0, 1, 2)) -> xr.Dataset:
    """Return variables along heads in every way that results and parameters have them."""
    rng, n = np.random.default_rng(0), len(seeds)
    weights = rng.normal(size=(n, 4, 2, 3, 5))
    return xr.Dataset(
        {
            "W_Q": (("seed", "step", "layer", "head", "d_model"), weights, {"units": "1"}),
            "turned": (("head", "d_model", "layer", "seed"), weights[:, 0].T.swapaxes(0, 1)),
            "n": (("seed", "layer", "head"), rng.integers(9, size=(n, 2, 3))),
            "loss": (("seed", "step"), weights[..., 0, 0, 0]),
            "alone": ((), 3.0),
        },
        coords={"seed": list(seeds), "step": range(4)},
        attrs={"probe": "x"},
    )


def orders(seeds: tuple[int, ...] = (0, 1, 2), draw: int = 1) -> xr.DataArray:
    rng = np.random.default_rng(draw)
    rows = [[rng.permutation(3) for _ in range(2)] for _ in seeds]
    return xr.DataArray(
        np.array(rows, dtype=float), dims=("seed", "layer", "head"), coords={"seed": list(seeds)}
    )


def test_a_head_goes_to_its_place_and_nothing_else_moves():
    given, places = data(), orders()
    out = aligned(given, places)
    checked = 0
    for seed, layer, head in np.ndindex(3, 2, 3):
        to = int(places[seed, layer, head])
        for name in ("W_Q", "turned", "n"):
            one = given[name].isel(seed=seed, layer=layer)
            np.testing.assert_array_equal(
                out[name].isel(seed=seed, layer=layer, head=to), one.isel(head=head)
            )
            checked += 1
    assert checked == 54
    assert out["W_Q"].dims == given["W_Q"].dims and out["turned"].dims == given["turned"].dims
    assert out["n"].dtype == given["n"].dtype
    assert out["W_Q"].attrs == {"units": "1"} and out.attrs == {"probe": "x"}
    xr.testing.assert_identical(out[["loss", "alone"]], given[["loss", "alone"]])
    assert not out["W_Q"].equals(given["W_Q"])


def test_identity_inverse_and_composition():
    given, first, second = data(), orders(draw=1), orders(draw=2)
    identity = first.copy(data=np.broadcast_to(np.arange(3.0), first.shape))
    xr.testing.assert_identical(aligned(given, identity), given)
    inverse = first.copy(data=np.argsort(first.values, -1).astype(float))
    xr.testing.assert_identical(aligned(aligned(given, first), inverse), given)
    both = first.copy(data=np.take_along_axis(second.values, first.values.astype(int), -1))
    xr.testing.assert_identical(aligned(aligned(given, first), second), aligned(given, both))
    other = aligned(aligned(given, second), first)
    assert not other.equals(aligned(given, both)), "the order of two permutations matters"


def test_what_has_no_order_is_nan_and_the_rest_is_not():
    given, places = data(), orders()
    places[1, 0] = np.nan
    out = aligned(given, places)
    assert out["W_Q"].isel(seed=1, layer=0).isnull().all()
    assert out["n"].isel(seed=1, layer=0).isnull().all()
    assert int(out["W_Q"].isnull().sum()) == 4 * 3 * 5
    assert out["loss"].notnull().all()


def test_some_seeds_and_one_layer():
    given, places = data(), orders()
    whole = aligned(given, places)
    xr.testing.assert_identical(aligned(given.isel(seed=[2, 0]), places), whole.isel(seed=[2, 0]))
    xr.testing.assert_identical(aligned(given.sel(seed=1), places), whole.sel(seed=1))
    flat = given[["W_Q"]].isel(layer=1)
    one = places.isel(layer=[1])
    xr.testing.assert_identical(aligned(flat, one), whole[["W_Q"]].isel(layer=1))
    xr.testing.assert_identical(aligned(flat, one.isel(layer=0)), aligned(flat, one))


def bad_rows() -> xr.DataArray:
    places = orders()
    places[0, 0] = [0, 0, 2]
    return places


@pytest.mark.parametrize(
    ("given", "places", "message"),
    [
        (data((0, 1, 9)), orders(), r"seeds \[0, 1, 2\]; the dataset has \[0, 1, 9\]"),
        (data().drop_vars("seed"), orders(), r"the dataset has \[\]"),
        (data().isel(head=[0, 1]), orders(), "as many heads and layers"),
        (data().isel(layer=0), orders(), r"permutation\.isel\(layer"),
        (data().assign(x=("head", [0.0, 1.0, 2.0])), orders().isel(layer=0), "no seed"),
        (data(), bad_rows(), "each place from 0 once"),
        (data(), orders().expand_dims(step=[0]), r"is \(seed, layer, head\)"),
        (data(), orders().isel(head=0), r"is \(seed, layer, head\)"),
    ],
)
def test_what_does_not_fit_is_refused(given, places, message):
    with pytest.raises(InputError, match=message):
        aligned(given, places)
