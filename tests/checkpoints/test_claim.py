import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mechicl.checkpoints import TrajectoryWriter, files, read_config
from mechicl.checkpoints import writer as writing
from mechicl.checkpoints.layout import (
    ANALYSES,
    CONFIG,
    LOCK,
    LOCK_HOLDER,
    REPLACED,
    TRAJECTORY,
    resume_name,
)
from mechicl.errors import InputError, MechiclError, NothingToAnalyseError, RunLockedError
from tests.checkpoints.common import assert_prefix, make_checkpoint, make_plan, read, write


def test_a_run_is_not_replaced_unasked(tmp_path):
    plan, run = make_plan(), tmp_path / "run"
    write(run, plan, 3)
    with pytest.raises(InputError, match="--resume, replace it with --overwrite"):
        TrajectoryWriter.create(run, plan, {})
    assert_prefix(read(run), plan, 3)


def test_overwrite_replaces_a_run_and_nothing_else(tmp_path):
    run = tmp_path / "run"
    write(run, make_plan(), 3)
    (run / ANALYSES).mkdir()
    (run / ANALYSES / "old.zarr").touch()
    (run / "notes.txt").write_text("mine")
    new = make_plan(range(0, 30, 3), seeds=(4,))
    with TrajectoryWriter.create(run, new, {"recipe": "new"}, overwrite=True) as writer:
        with pytest.raises(NothingToAnalyseError, match="no checkpoint yet"):
            read(run)
        writer.add(make_checkpoint(new, 0))
        writer.add(make_checkpoint(new, 1))
    assert_prefix(read(run), new, 2)
    assert read_config(run) == {"recipe": "new"}
    assert {path.name for path in run.iterdir()} == {
        LOCK,
        CONFIG,
        TRAJECTORY,
        resume_name(3),
        "notes.txt",
    }


def test_what_is_not_a_run_is_never_replaced(tmp_path):
    def refused(path, message):
        with pytest.raises(InputError, match=message):
            TrajectoryWriter.create(path, make_plan(), {}, overwrite=True)

    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file", "is not a directory")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    refused(tmp_path / "dangling", "is not a directory")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    refused(tmp_path / "folder", r"not a run \(thesis\.tex\)")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thesis.tex"]
    write(tmp_path / "runs" / "a", make_plan(), 1)
    refused(tmp_path / "runs", "not a run")
    with pytest.raises(MechiclError, match="cannot make the directory"):
        TrajectoryWriter.create(tmp_path / "file" / "run", make_plan(), {})
    with pytest.raises(InputError, match="not plain YAML"):
        TrajectoryWriter.create(tmp_path / "new", make_plan(), {"a": np.float64(3)})
    assert not (tmp_path / "new").exists()


def test_what_file_browsers_leave_is_no_obstacle(tmp_path):
    run = tmp_path / "run"
    (run / ".ipynb_checkpoints").mkdir(parents=True)
    (run / ".DS_Store").write_text("theirs")
    with pytest.raises(NothingToAnalyseError, match="is empty"):
        read(run)
    write(run, make_plan(), 2)
    assert_prefix(read(run), make_plan(), 2)
    write(run, make_plan(), 3, overwrite=True)
    assert (run / ".DS_Store").read_text() == "theirs"


def test_overwrite_follows_a_link(tmp_path):
    write(tmp_path / "real", make_plan(), 3)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", make_plan(), 2, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert_prefix(read(tmp_path / "real"), make_plan(), 2)


@pytest.mark.parametrize("stage", ["rename", "config", "allocate"])
def test_a_replacing_that_is_cut_short_loses_nothing(tmp_path, monkeypatch, stage):
    run = tmp_path / "run"
    write(run, make_plan(), 3)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if stage == "rename":
            original = Path.rename

            def rename(self, target):
                return fail() if self.name == CONFIG else original(self, target)

            patch.setattr(Path, "rename", rename)
        elif stage == "config":
            original = files.write_file
            patch.setattr(
                writing, "write_file", lambda p, d: fail() if p.name == CONFIG else original(p, d)
            )
        else:
            patch.setattr(writing, "allocate", fail)
        with pytest.raises(MechiclError, match="cannot begin a run"):
            TrajectoryWriter.create(run, make_plan(), {}, overwrite=True)
    (aside,) = run.glob(REPLACED + "*")
    with pytest.raises(NothingToAnalyseError, match=f"the earlier run is in {aside}"):
        read(run)
    with pytest.raises(InputError, match="--overwrite"):
        TrajectoryWriter.create(run, make_plan(), {})
    for path in aside.iterdir():
        path.rename(run / path.name)
    aside.rmdir()
    assert_prefix(read(run), make_plan(), 3)
    write(run, make_plan(), 2, overwrite=True)
    assert_prefix(read(run), make_plan(), 2)


def test_what_is_left_of_a_creation_that_was_killed_is_no_obstacle(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in (LOCK, LOCK_HOLDER, CONFIG + files.PARTIAL):
        (run / name).touch()
    write(run, make_plan(), 2)
    assert_prefix(read(run), make_plan(), 2)


TRY = """
import sys
from mechicl.checkpoints import TrajectoryWriter
from tests.checkpoints.common import make_plan
try:
    if sys.argv[2] == "resume":
        TrajectoryWriter.resume(sys.argv[1])
    else:
        TrajectoryWriter.create(sys.argv[1], make_plan(), {}, overwrite=True)
except Exception as error:
    print(type(error).__name__, error)
"""


def try_elsewhere(run: Path, how: str) -> str:
    command = [sys.executable, "-c", TRY, str(run), how]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_second_process_is_refused_with_pid_and_host(tmp_path):
    run = tmp_path / "run"
    with TrajectoryWriter.create(run, make_plan(), {}) as writer:
        writer.add(make_checkpoint(make_plan(), 0))
        for how in ("resume", "overwrite"):
            answer = try_elsewhere(run, how)
            assert answer.startswith("RunLockedError")
            assert f"process {os.getpid()} on {socket.gethostname()} is writing {run}" in answer
        for begin in (
            lambda: TrajectoryWriter.resume(run),
            lambda: TrajectoryWriter.create(run, make_plan(), {}, overwrite=True),
        ):
            with pytest.raises(RunLockedError):
                begin()
        writer.add(make_checkpoint(make_plan(), 1))
    assert_prefix(read(run), make_plan(), 2)
    assert try_elsewhere(run, "resume") == ""


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced", "lock deleted"])
def test_a_run_that_is_taken_from_under_its_writer_is_written_no_more(tmp_path, how):
    run, plan, moved = tmp_path / "run", make_plan(), tmp_path / "moved"
    with (
        pytest.raises(MechiclError, match="moved, replaced or deleted while"),
        TrajectoryWriter.create(run, plan, {"recipe": "x"}) as writer,
    ):
        writer.add(make_checkpoint(plan, 0))
        writer.commit()
        if how == "lock deleted":
            (run / LOCK).unlink()
        else:
            run.rename(moved)
        if how == "deleted":
            shutil.rmtree(moved)
        other = (
            TrajectoryWriter.create(run, make_plan(seeds=(7,)), {}) if how == "replaced" else None
        )
        before = sorted(run.rglob("*"))
        writer.add(make_checkpoint(plan, 1))
    assert sorted(run.rglob("*")) == before, "nothing was written, and no holder's name removed"
    if other is not None:
        other.add(make_checkpoint(make_plan(seeds=(7,)), 0))
        other.__exit__(None, None, None)
        assert_prefix(read(run), make_plan(seeds=(7,)), 1)
    if how in ("moved", "replaced"):
        write(moved, plan, 4, start=1)
        assert_prefix(read(moved), plan, 4)


def test_what_a_dead_process_said_does_not_block(tmp_path):
    run = tmp_path / "run"
    write(run, make_plan(), 1)
    (run / LOCK_HOLDER).write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with TrajectoryWriter.resume(run):
        assert json.loads((run / LOCK_HOLDER).read_text())["pid"] == os.getpid()
        (run / LOCK_HOLDER).write_text("{")
        with pytest.raises(RunLockedError, match="another process is writing"):
            TrajectoryWriter.resume(run)
