"""Paths as users give them: `~`, above all of a user that is not there."""

from collections.abc import Callable
from pathlib import Path

import pytest

import mechicl
from mechicl.errors import InputError
from mechicl.paths import expanded
from mechicl.studies import load_claim
from mechicl.training import load_recipe

NOBODY = "~nobody-is-called-so/x"


@pytest.mark.parametrize(
    ("call", "ending"),
    [
        (mechicl.open_run, ""),
        (lambda path: mechicl.study(path, "circuits"), ""),
        (lambda path: mechicl.study(".", "circuits", out=path), ".zarr"),
        (mechicl.open_study, ".zarr"),
        (mechicl.report, ""),
        (mechicl.report, ".zarr"),
        (mechicl.sweep, ".yaml"),
        (load_recipe, ".yaml"),
        (load_claim, ".yaml"),
    ],
)
def test_the_home_of_nobody_is_a_mistake(call: Callable[[str], object], ending: str) -> None:
    with pytest.raises(InputError, match="begins with the home of a user that this machine does"):
        call(NOBODY + ending)


def test_a_home_is_expanded_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/runs") == Path("/home/me/runs")
    assert expanded("runs/~x") == Path("runs/~x")


def test_nothing_else_expands_it() -> None:
    """What does must answer for homes that are not there as well."""
    package = Path(mechicl.__file__).parent
    doing = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if ".expanduser()" in path.read_text(encoding="utf-8")
    ]
    assert doing == ["paths.py"]
