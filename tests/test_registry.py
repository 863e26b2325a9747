import sys
import types
from importlib.metadata import EntryPoint

import pytest

from mechicl import registry as module
from mechicl.errors import InputError
from mechicl.registry import Registry


@pytest.fixture
def colours(monkeypatch) -> Registry[str]:
    """Return a registry with one built-in, whose module registers it when it is imported."""
    registry: Registry[str] = Registry("colour", {"deep_red": "fake_colours"})

    def register(name: str) -> types.ModuleType:
        assert name == "fake_colours"
        registry.add("deep_red", "#800000", owner="fake_colours")
        return types.ModuleType(name)

    monkeypatch.setattr(module, "import_module", register)
    return registry


def test_built_ins_are_named_without_being_imported_and_loaded_when_asked_for(colours):
    assert colours.names() == ("deep_red",)
    assert colours._entries == {}
    assert colours.get("deep_red") == "#800000"
    assert colours.get("deep-red") == "#800000"
    assert colours.get(" deep_red ") == "#800000"


def test_names_are_sorted(colours):
    colours.add("blue", "#0000FF", owner="here")
    assert colours.names() == ("blue", "deep_red")


def test_a_duplicate_is_refused_naming_the_holder(colours):
    colours.add("blue", "#0000FF", owner="here")
    with pytest.raises(InputError, match=r"colour 'blue' of there is already registered by here"):
        colours.add("blue", "#0000EE", owner="there")
    with pytest.raises(InputError, match="already registered by here"):
        colours.add("blue", "#0000EE", owner="here")
    assert colours.get("blue") == "#0000FF"


def test_the_name_of_a_built_in_is_taken_before_it_is_imported(colours):
    with pytest.raises(InputError, match="already registered by fake_colours"):
        colours.add("deep_red", "#FF0000", owner="there")
    assert colours.get("deep_red") == "#800000"


@pytest.mark.parametrize("name", ["deep-blue", "deep blue", "", "1st", " blue"])
def test_names_are_identifiers(colours, name):
    with pytest.raises(InputError, match="is not a Python identifier"):
        colours.add(name, "#", owner="here")


def test_an_unknown_name_gets_its_near_matches(colours):
    with pytest.raises(InputError, match=r"no colour 'deep-rad'; did you mean 'deep_red'\?"):
        colours.get("deep-rad")
    with pytest.raises(InputError, match="Known: deep_red"):
        colours.get("zzz")


def test_outside_packages_add_entries_by_entry_point(colours, monkeypatch):
    outside = types.ModuleType("outside_colours")
    monkeypatch.setitem(sys.modules, "outside_colours", outside)
    loaded = []

    def load(point: EntryPoint) -> None:
        loaded.append(point.name)
        colours.add(point.name, "#00FF00", owner=point.value)

    points = [EntryPoint("green", "outside_colours", "mechicl.colours")]
    monkeypatch.setattr(EntryPoint, "load", load)

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "mechicl.colours"
        return [point for point in points if name in (None, point.name)]

    monkeypatch.setattr(module, "entry_points", entry_points)
    assert colours.group == "mechicl.colours"
    assert colours.names() == ("deep_red", "green")
    assert loaded == []
    assert colours.get("green") == "#00FF00"
    assert colours.get("deep_red") == "#800000"
    assert loaded == ["green"]
    with pytest.raises(InputError, match="did you mean 'green'"):
        colours.get("grene")


def test_an_entry_point_that_registers_nothing_of_its_name_is_unknown(colours, monkeypatch):
    monkeypatch.setattr(EntryPoint, "load", lambda point: None)
    monkeypatch.setattr(
        module,
        "entry_points",
        lambda group, name=None: [EntryPoint("green", "outside_colours", group)],
    )
    with pytest.raises(InputError, match="there is no colour 'green'"):
        colours.get("green")
