"""`mechicl hooks`: the table, the document, and that no checkpoint is read."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import mechicl
from mechicl.cli import app
from mechicl.errors import DamagedRunError

PATTERN = "blocks.0.attn.hook_pattern"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def cells(text: str, name: str) -> list[str]:
    """The cells of the row of one hook point."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return [cell.strip() for cell in line.split("  ") if cell.strip()][1:]


def test_the_table_has_every_hook_point(run_dir: Path) -> None:
    done = call("hooks", run_dir)
    assert done.exit_code == 0, done.stderr
    assert cells(done.stdout, PATTERN) == ["1, 2, 6, 6", "batch, head, query_pos, key_pos"]
    assert cells(done.stdout, "hook_embed") == ["never fires", "batch, pos, d_model"]
    assert cells(done.stdout, "blocks.0.hook_q_input") == ["never fires", "no names"]
    for name in mechicl.open_run(run_dir).hooks():
        cells(done.stdout, name)


def test_json_is_one_document(run_dir: Path) -> None:
    done = call("hooks", run_dir, "--json")
    document = json.loads(done.stdout)
    run = mechicl.open_run(run_dir)
    assert document["run"] == str(run_dir)
    assert document["run_digest"] == run.trajectory.attrs["run_digest"]
    found = {
        each["name"]: tuple(each[key] and tuple(each[key]) for key in ("dims", "shape"))
        for each in document["hooks"]
    }
    assert list(found.items()) == list(run.hooks().items())
    assert found[PATTERN][1] == (1, 2, 6, 6)
    assert found["blocks.0.hook_q_input"] == (None, None)


def test_hook_points_of_a_damaged_run_are_known(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    for path in copy.glob("trajectory.zarr/W_Q/c/**/*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(DamagedRunError):
        mechicl.open_run(copy).model(step=0, seed=0)
    assert call("hooks", copy).stdout == call("hooks", run_dir).stdout != ""


@pytest.mark.parametrize(("path", "code"), [("absent", 2), ("empty", 3)])
def test_what_is_no_run_is_refused(tmp_path: Path, path: str, code: int) -> None:
    (tmp_path / "empty").mkdir()
    done = call("hooks", tmp_path / path)
    assert (done.exit_code, done.stdout) == (code, "")
    assert str(tmp_path / path) in done.stderr
