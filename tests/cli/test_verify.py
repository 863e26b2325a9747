"""`mechicl verify`: what it prints, and its exit codes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mechicl.cli import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def chunk(run: Path) -> Path:
    (path,) = (path for path in run.glob("trajectory.zarr/W_Q/**/0") if path.is_file())
    return path


def test_a_trained_run_is_whole(run_copy: Path) -> None:
    done = call("verify", run_copy)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{run_copy} is whole.\n"


def test_damage_is_listed_and_exits_with_1(run_copy: Path) -> None:
    path = chunk(run_copy)
    path.write_bytes(path.read_bytes()[:100])
    (run_copy / ".replaced-x").mkdir()
    done = call("verify", run_copy)
    assert done.exit_code == 1
    line = next(line for line in done.stdout.splitlines() if "W_Q" in line)
    assert " ".join(line.split()) == (
        "damage truncated W_Q 0, 3 0 to 2,000 (57) trajectory.zarr/W_Q/c/0/0/0/0/0/0 is cut short: "
        "100 of 32,836 bytes"
    )
    assert done.stdout.splitlines()[-1].startswith(f"{run_copy} is damaged in 1 place; 1 remark. ")
    assert "--skip-damaged" in done.stdout


def test_remarks_alone_exit_with_0(run_copy: Path) -> None:
    (run_copy / "config.yaml.partial").touch()
    done = call("verify", run_copy)
    assert done.exit_code == 0
    assert "leftover" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{run_copy} is whole; 1 remark."


def test_json_is_one_document(run_copy: Path) -> None:
    whole = {"run": str(run_copy), "damaged": False, "findings": []}
    assert json.loads(call("verify", run_copy, "--json").stdout) == whole
    chunk(run_copy).unlink()
    done = call("verify", run_copy, "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["damaged"] is True
    (finding,) = document["findings"]
    assert len(finding.pop("steps")) == 57
    assert finding == {
        "what": "missing",
        "severity": "damage",
        "file": chunk_name(run_copy),
        "message": "is missing",
        "array": "W_Q",
        "seeds": [0, 3],
    }


def chunk_name(run: Path) -> str:
    (folder,) = (path for path in run.glob("trajectory.zarr/W_Q/c/0/0/0/0/0") if path.is_dir())
    return (folder / "0").relative_to(run).as_posix()


@pytest.mark.parametrize("name", ["absent", "empty", "other", "file", ""])
def test_what_is_no_run_is_answered_as_by_info(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").touch()
    (tmp_path / "file").touch()
    path = tmp_path / name if name else ""
    verified, told = call("verify", path), call("info", path)
    assert verified.exit_code == told.exit_code == (3 if name == "empty" else 2)
    assert verified.stdout == ""
    if name:
        assert verified.stderr == told.stderr
