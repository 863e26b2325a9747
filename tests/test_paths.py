"""Paths as users give them: `~`, above all of a user that is not there."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import mechicl
from mechicl import checkpoints
from mechicl.errors import InputError
from mechicl.paths import expanded
from mechicl.studies import load_claim, reproduce
from mechicl.training import load_recipe
from tests import runs

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


@pytest.mark.parametrize("inside", [".", "figures/x", "trajectory.zarr/x", "../a/x"])
def test_nothing_is_put_into_a_run(tmp_path: Path, inside: str) -> None:
    run = tmp_path / "runs" / "a"
    runs.write(run)
    (tmp_path / "link").symlink_to(run)
    sweep = {"recipe": "he2025-two-head-quick", "grid": {"n_heads": [1]}}
    (tmp_path / "a.yaml").write_text(json.dumps(sweep))
    for place in (run / inside, tmp_path / "link" / inside):
        with pytest.raises(InputError, match="lies in a run, which is left as it is"):
            mechicl.sweep(tmp_path / "a.yaml", place)
        with pytest.raises(InputError, match="lies in a run, which is left as it is"):
            reproduce("he2025.table1", out=place)
        if inside != ".":
            with pytest.raises(InputError, match="lies in a run, which is left as it is"):
                mechicl.train("he2025-two-head-quick", place)
            with pytest.raises(InputError, match="lies in a run, which is left as it is"):
                mechicl.study(run, "sign_matching", out=place / "s.zarr")
    assert checkpoints.verify(run) == []
    assert sorted(path.name for path in run.parent.iterdir()) == ["a"]


def test_a_config_of_another_program_makes_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("hydra: {}\nmodel: {recipe: no}\n")
    runs.write(tmp_path / "runs" / "a")
    made = mechicl.study(tmp_path, "sign_matching", out=tmp_path / "s.zarr", figures=False)
    assert made.runs["run_path"].values.tolist() == [str(tmp_path / "runs" / "a")]


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
