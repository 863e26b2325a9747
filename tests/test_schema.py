import numpy as np
import pytest
import xarray as xr

from mechicl import schema
from mechicl.errors import InputError, SchemaError
from mechicl.schema import UNITS, Var, add_dim, check, flag_names, stamp


def dataset() -> xr.Dataset:
    return xr.Dataset(
        {
            "loss": (("seed", "step"), np.array([[1.0, np.nan]]), {"units": "nat", "x": "stray"}),
            "scale": ((), 0.5, {"units": "1"}),
        },
        coords={"step": ("step", [0, 1], {"units": "step", "kept": "yes"})},
        attrs={"stray": 1},
    )


LOSS = Var(("seed", "step"), "nat", "loss", 0)
SCALE = Var((), "1", "scale", 0, 1)


def test_what_fits_passes():
    check(dataset(), {"loss": LOSS, "scale": SCALE}, where="here", ordered=True)


def test_every_mismatch_is_listed_in_one_error():
    data = dataset()
    data["loss"] = data["loss"].isel(seed=0) - 2
    declared = {"loss": LOSS, "scale": Var((), "token", "scale", 1), "gone": SCALE}
    with pytest.raises(SchemaError) as caught:
        check(data, declared, where="input of x")
    text = str(caught.value)
    assert text.startswith("input of x: ")
    for part in (
        "'loss' has dims ('step',), not ('seed', 'step')",
        "'loss' has 1 values outside [0, inf]",
        "'scale' is in '1', not 'token'",
        "'scale' has 1 values outside [1, inf]",
        "'gone' is missing (dims ())",
    ):
        assert part in text
    assert caught.value.exit_code == 2


def test_order_of_dims_counts_only_where_it_is_asked_for():
    data = dataset().transpose("step", "seed")
    check(data, {"loss": LOSS}, where="here")
    with pytest.raises(SchemaError, match=r"has dims \('step', 'seed'\)"):
        check(data, {"loss": LOSS}, where="here", ordered=True)


def test_a_variable_without_units_does_not_fit():
    data = dataset()
    del data["scale"].attrs["units"]
    with pytest.raises(SchemaError, match="'scale' is in None, not '1'"):
        check(data, {"scale": SCALE}, where="here")


@pytest.mark.parametrize(("value", "fits"), [(0, 1), (1, 1), (-1e-9, 0), (1.1, 0), (np.inf, 0)])
def test_ranges_include_their_ends(value, fits):
    data = dataset()
    data["scale"] = data["scale"] * 0 + value
    data["scale"].attrs["units"] = "1"
    if fits:
        check(data, {"scale": SCALE}, where="here")
    else:
        with pytest.raises(SchemaError, match="outside"):
            check(data, {"scale": SCALE}, where="here")


def test_nan_is_allowed_everywhere_and_empty_arrays_too():
    data = dataset()
    data["loss"][:] = np.nan
    check(data, {"loss": LOSS}, where="here")
    check(data.isel(step=slice(0)), {"loss": LOSS}, where="here")


def test_declarations_are_checked_when_they_are_made():
    with pytest.raises(InputError, match=r"no dims \['sead'\].*add_dim"):
        Var(("sead",), "1", "x")
    with pytest.raises(InputError, match="repeat an axis"):
        Var(("seed", "seed"), "1", "x")
    with pytest.raises(InputError, match="no unit 'bit'; units are 1, nat"):
        Var(("seed",), "bit", "x")
    assert len(UNITS) == len(set(UNITS))


def test_outside_packages_add_axes(monkeypatch):
    monkeypatch.setattr(schema, "DIMS", dict(schema.DIMS))
    add_dim("planet", "a planet")
    add_dim("planet", "a planet")
    assert Var(("planet",), "1", "x").dims == ("planet",)
    with pytest.raises(InputError, match="dim 'planet' already means 'a planet'"):
        add_dim("planet", "a moon")


def test_stamp_states_units_afresh():
    data = dataset()
    declared = {"loss": Var(("seed", "step"), "1", "square"), "absent": SCALE}
    out = stamp(data.assign(loss=data["loss"] ** 2), declared)
    assert out["loss"].attrs == {"units": "1", "long_name": "square"}
    assert out["scale"].attrs == {}
    assert out["step"].attrs == {"units": "step", "kept": "yes"}
    assert out.attrs == {}
    assert data.attrs == {"stray": 1} and data["loss"].attrs["x"] == "stray"


def test_flags_are_written_and_read_back():
    var = Var(("seed",), "1", "role", -1, 1, flags={-1: "negative", 0: "dummy", 1: "positive"})
    assert var.attrs["flag_values"] == [-1, 0, 1]
    assert var.attrs["flag_meanings"] == "negative dummy positive"
    data = stamp(xr.Dataset({"role": ("seed", [0, 1])}), {"role": var})
    assert flag_names(data["role"]) == dict(var.flags)
    data["role"].attrs["flag_values"] = np.array([-1, 0, 1])  # as Zarr may give it back
    assert flag_names(data["role"]) == dict(var.flags)
    assert flag_names(xr.DataArray(0)) == {}


def test_attributes_are_the_declarations_own_copy():
    var = Var((), "1", "x")
    var.attrs["units"] = "nat"
    data = stamp(xr.Dataset({"x": 1.0}), {"x": var})
    data["x"].attrs["units"] = "nat"
    assert var.attrs["units"] == "1"
