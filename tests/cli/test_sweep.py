"""`mechicl sweep`: exit codes, one JSON document, and a status that trains nothing."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from mechicl.cli import app

SWEEP = {
    "recipe": "he2025-two-head-quick",
    "set": {"d": 2, "n_context": 5, "batch_size": 8, "n_steps": 4, "seeds": [0]},
    "grid": {"n_heads": [1, 2]},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "heads.yaml"
    path.write_text(yaml.safe_dump(SWEEP))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["sweep", *[str(argument) for argument in arguments]])


def test_status_trains_nothing_and_training_says_what_became(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = call(file, "--out", out, "--status")
    assert before.exit_code == 0, before.stderr
    assert "2 runs: 2 planned" in before.stdout
    assert not out.exists()
    done = call(file, "--out", out, "--no-compile")
    assert done.exit_code == 0, done.stderr
    assert "2 runs: 2 complete" in done.stdout
    assert "n_heads-2" in done.stdout and "model.n_heads" in done.stdout
    assert f"mechicl study '{out}/*'" in done.stdout


def test_what_comes_next_is_a_command_for_any_directory(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "of my $HOME; it's"
    line = call(file, "--out", out, "--status").stdout.splitlines()[-1]
    assert shlex.split(line) == [
        *["next:", "mechicl", "study", f"{out}/*", "--probe", "PROBE", "--out", f"{out}.zarr"]
    ]


def test_json_is_one_document(file: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "n_heads-1" / "mine").mkdir(parents=True)
    done = call(file, "--out", tmp_path / "out", "--no-compile", "--json")
    assert done.exit_code == 4
    document = json.loads(done.stdout)
    assert [entry["status"] for entry in document] == ["failed", "complete"]
    assert document[1]["settings"] == {"model.n_heads": 2}
    assert "n_heads-1: failed: " in done.stderr


def test_exit_codes(file: Path, tmp_path: Path) -> None:
    for name in ("n_heads-1", "n_heads-2"):
        (tmp_path / "none" / name / "mine").mkdir(parents=True)
    assert call(file, "--out", tmp_path / "none", "--no-compile").exit_code == 1
    own = SWEEP["set"] | {"optimizer.name": "sgd", "learning_rate": 1e6, "n_steps": 60}
    file.write_text(yaml.safe_dump(SWEEP | {"set": own}))
    diverged = call(file, "--out", tmp_path / "diverged", "--no-compile")
    assert diverged.exit_code == 1, diverged.stdout
    assert "2 complete" in diverged.stdout
    for more in ([], ["--status"]):
        wrong = call(file, "--device", "cdua", *more)
        assert (wrong.exit_code, wrong.stdout) == (2, "")
    absent = call(tmp_path / "absent.yaml")
    assert (absent.exit_code, absent.stdout) == (2, "")
    assert "there is no sweep file" in absent.stderr
