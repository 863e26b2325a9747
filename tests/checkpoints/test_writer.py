import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mechicl.checkpoints import (
    Schedule,
    TrajectoryWriter,
    files,
    layout,
    read_config,
    read_trajectory,
)
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
from mechicl.errors import (
    DamagedRunError,
    InputError,
    MechiclError,
    NothingToAnalyseError,
    RunLockedError,
)
from tests.checkpoints.common import (
    assert_prefix,
    chunk,
    flip_bit,
    make_checkpoint,
    make_plan,
    read,
    write,
)

LATER = 1e9


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    schedule=st.builds(
        Schedule, every=st.integers(1, 30), per_decade=st.integers(0, 8), at=st.just((7,))
    ),
    n_steps=st.integers(7, 60),
    seeds=st.sampled_from([(0,), (3, 1), (0, 1, 2, 5)]),
    chunk_steps=st.integers(1, 9),
    chunk_log_steps=st.integers(1, 40),
    stops=st.lists(st.integers(0, 60), max_size=3),
    commit_seconds=st.sampled_from([0.0, LATER]),
)
def test_what_is_read_is_what_was_given(
    tmp_path_factory,
    monkeypatch,
    schedule,
    n_steps,
    seeds,
    chunk_steps,
    chunk_log_steps,
    stops,
    commit_seconds,
):
    """Whatever the schedule and the chunks, and wherever it is stopped and continued."""
    monkeypatch.setattr(layout, "MAX_CHUNK_STEPS", chunk_steps)
    monkeypatch.setattr(layout, "MAX_CHUNK_LOG_STEPS", chunk_log_steps)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the order of flushes is another test's
    run = tmp_path_factory.mktemp("runs") / "run"
    plan = make_plan(schedule.steps(n_steps), seeds)
    n_saved = 0
    TrajectoryWriter.create(run, plan, {"recipe": "x"}).__exit__(None, None, None)
    for stop in [*sorted(min(stop, len(plan.steps)) for stop in stops), len(plan.steps)]:
        with TrajectoryWriter.resume(run, commit_seconds=commit_seconds) as writer:
            assert writer.n_saved == n_saved
            for index in range(n_saved, stop):
                writer.add(make_checkpoint(plan, index))
        n_saved = stop
        if n_saved:
            assert_prefix(read(run), plan, n_saved)
            whole = xr.open_zarr(run / TRAJECTORY, chunks=None)
            assert np.isnan(whole["W_Q"][:, n_saved:]).all()
            assert np.isnan(whole["loss"][:, plan.steps[n_saved - 1] :]).all()
    assert read(run).attrs["complete"] == 1


def test_resume_gives_back_the_last_commit_exactly(tmp_path):
    plan, run = make_plan(), tmp_path / "run"
    with TrajectoryWriter.create(run, plan, {}) as writer:
        assert (writer.n_saved, writer.resume_state, writer.last_parameters()) == (0, {}, {})
        np.testing.assert_array_equal(writer.steps, plan.steps)
        for index in range(4):
            writer.add(make_checkpoint(plan, index, diverged_at=[np.nan, 3 if index else np.nan]))
    given_last = make_checkpoint(plan, 3)
    with TrajectoryWriter.resume(run) as writer:
        assert writer.n_saved == 4
        np.testing.assert_array_equal(writer.diverged_at, [np.nan, 3])
        for found, expected in (
            (writer.last_parameters(), given_last.parameters),
            (writer.resume_state, given_last.resume),
        ):
            assert found.keys() == expected.keys()
            for name in expected:
                assert found[name].dtype == expected[name].dtype
                np.testing.assert_array_equal(found[name], expected[name])


def test_the_optimiser_state_of_the_last_commit_alone_is_kept(tmp_path):
    run = tmp_path / "run"
    write(run, make_plan(), 4, commit_seconds=0)
    assert_resume_files(run, 15)
    (run / resume_name(999)).touch()  # of a commit that a kill cut short
    (run / (resume_name(998) + files.PARTIAL)).touch()
    write(run, make_plan(), 6, start=4)
    assert_resume_files(run, 25)


def assert_resume_files(run: Path, *steps: int) -> None:
    assert {path.name for path in run.glob("resume-*")} == {resume_name(step) for step in steps}


def test_copies_of_an_optimiser_state_are_no_business_of_the_writers(tmp_path):
    run, plan = tmp_path / "run", make_plan()
    write(run, plan, 3)
    mine = [f"{resume_name(10)}.bak", "resume-10 (copy).safetensors", "resume-old.safetensors"]
    for name in mine:
        (run / name).write_text("mine")
    (run / f"{resume_name(5)}{files.PARTIAL}").touch()
    write(run, plan, 5, start=3)
    assert {path.name for path in run.glob("resume-*")} == {*mine, resume_name(20)}
    write(run, plan, 2, overwrite=True)
    assert {path.name for path in run.glob("resume-*")} == {*mine, resume_name(5)}
    assert {(run / name).read_text() for name in mine} == {"mine"}


def test_what_is_given_may_be_changed_afterwards(tmp_path):
    plan, run = make_plan(), tmp_path / "run"
    with TrajectoryWriter.create(run, plan, {}, commit_seconds=LATER) as writer:
        for index in range(2):
            one = make_checkpoint(plan, index)
            writer.add(one)
            for array in (*one.parameters.values(), one.loss, one.diverged_at, one.resume["m"]):
                array[...] = 99
    assert_prefix(read(run), plan, 2)
    with TrajectoryWriter.resume(run) as writer:
        np.testing.assert_array_equal(
            writer.resume_state["m"], make_checkpoint(plan, 1).resume["m"]
        )


def test_special_values_are_kept_bit_for_bit(tmp_path):
    plan, run = make_plan(), tmp_path / "run"
    one = make_checkpoint(plan, 0)
    bits = np.array([0x80000000, 0x00000001], dtype=np.uint32)  # -0.0 and the least denormal
    one.parameters["b_Q"][:] = bits.view(np.float32)
    one.parameters["W_Q"][0] = np.nan
    two = make_checkpoint(plan, 1)
    two.loss[1] = [np.inf, np.nan, -np.inf, 1, 1]
    with TrajectoryWriter.create(run, plan, {}) as writer:
        writer.add(one)
        writer.add(two)
    dataset = read(run)
    np.testing.assert_array_equal(dataset["b_Q"].values[:, 0].view(np.uint32), bits)
    assert np.isnan(dataset["W_Q"][0, 0]).all()
    np.testing.assert_array_equal(dataset["loss"][1], two.loss[1])


def test_chunks_that_are_all_nan_are_written_too(tmp_path):
    plan, run = make_plan(), tmp_path / "run"
    one = make_checkpoint(plan, 0)
    one.parameters["b_Q"][:] = np.nan
    with TrajectoryWriter.create(run, plan, {}) as writer:
        writer.add(one)
    assert np.isnan(read(run)["b_Q"]).all()


def test_commits_when_a_chunk_is_full_or_the_time_has_come(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "MAX_CHUNK_STEPS", 7)
    plan, run = make_plan(), tmp_path / "run"
    clock = [100.0]
    monkeypatch.setattr(writing.time, "monotonic", lambda: clock[0])
    with TrajectoryWriter.create(run, plan, {}) as writer:
        counts = []
        for index in range(16):
            writer.add(make_checkpoint(plan, index))
            counts.append(writer.n_saved)
            clock[0] += 3
        assert counts == [0, 0, 0, 0, 5, 5, 7, 7, 7, 7, 11, 11, 11, 14, 14, 14]
        writer.commit_if_due()
        assert writer.n_saved == 14
        clock[0] += 3
        writer.commit_if_due()
        assert writer.n_saved == 16
        assert read(run).attrs["n_saved"] == 16


def test_a_commit_of_nothing_writes_nothing(tmp_path, monkeypatch):
    run = tmp_path / "run"
    write(run, make_plan(), 3)
    with TrajectoryWriter.resume(run) as writer:
        monkeypatch.setattr(files, "write_file", None)
        writer.commit()


STAGES = ["W_Q", "b_Q", "loss", "diverged_at", resume_name(40), "n_saved"]


def failing_at(monkeypatch, stage, error):
    """Make the write of `stage` fail; return the list of what was written before."""
    written = []
    original = files.write_file

    def write_file(path, data):
        if stage in path.parts:
            raise error
        written.extend(part for part in path.parts if part in STAGES)
        original(path, data)

    monkeypatch.setattr(files, "write_file", write_file)
    return written


@pytest.mark.parametrize("chunk_steps", [3, 256])  # the commit fills a chunk, or does not
@pytest.mark.parametrize("stage", STAGES)
def test_order_of_a_commit(tmp_path, monkeypatch, stage, chunk_steps):
    """Whichever write fails, those before it are done, and readers see the earlier prefix."""
    monkeypatch.setattr(layout, "MAX_CHUNK_STEPS", chunk_steps)
    plan, run = make_plan(), tmp_path / "run"
    write(run, plan, 7)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        written = failing_at(patch, stage, full)
        with (
            pytest.raises(MechiclError) as caught,
            TrajectoryWriter.resume(run, commit_seconds=LATER) as writer,
        ):
            written.clear()
            writer.add(make_checkpoint(plan, 7))
            writer.add(make_checkpoint(plan, 8, diverged_at=[np.nan, 36]))
    assert written == STAGES[: STAGES.index(stage)]
    message = str(caught.value)
    assert f"cannot write {stage} of {run}: No space left on device" in message
    assert "checkpoints up to step 30 (7 of 21) are safe" in message
    assert caught.value.__cause__ is full
    dataset = read(run)
    assert_prefix(dataset, plan, 7)
    assert np.isnan(dataset["diverged_at"]).all()  # it belongs to a checkpoint that does not count
    with TrajectoryWriter.resume(run) as writer:
        assert writer.n_saved == 7
        assert np.isnan(writer.diverged_at).all()
        assert writer.resume_state["count"] == 6
        for index in range(7, 21):
            writer.add(make_checkpoint(plan, index))
    assert_prefix(read(run), plan, 21)
    assert_resume_files(run, 100)


def test_a_failed_commit_can_be_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "MAX_CHUNK_STEPS", 5)
    plan, run = make_plan(), tmp_path / "run"
    with TrajectoryWriter.create(run, plan, {}, commit_seconds=LATER) as writer:
        for index in range(21):
            if index == 4:
                with monkeypatch.context() as patch:
                    failing_at(patch, "loss", OSError(errno.ENOSPC, "No space left on device"))
                    with pytest.raises(MechiclError, match="there is no checkpoint yet"):
                        writer.add(make_checkpoint(plan, 4))
                    with pytest.raises(MechiclError, match="No space"):
                        writer.add(make_checkpoint(plan, 5))
            else:
                writer.add(make_checkpoint(plan, index))
    assert_prefix(read(run), plan, 21)


def test_what_is_no_fault_of_the_disk_is_raised_as_it_is(tmp_path, monkeypatch):
    fault = ZeroDivisionError("a bug")
    with (
        pytest.raises(ZeroDivisionError) as caught,
        TrajectoryWriter.create(tmp_path / "run", make_plan(), {}) as writer,
    ):
        failing_at(monkeypatch, "loss", fault)
        writer.add(make_checkpoint(make_plan(), 0))
        writer.add(make_checkpoint(make_plan(), 1))
        writer.commit()
    assert caught.value is fault
    TrajectoryWriter.resume(tmp_path / "run").__exit__(None, None, None)  # it was released


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_what_stops_training_commits_first(tmp_path, error):
    plan, run = make_plan(), tmp_path / "run"
    with (
        pytest.raises(error),
        TrajectoryWriter.create(run, plan, {}, commit_seconds=LATER) as writer,
    ):
        for index in range(3):
            writer.add(make_checkpoint(plan, index))
        raise error
    assert_prefix(read(run), plan, 3)


def test_an_interrupt_during_a_commit_lets_it_finish(tmp_path, monkeypatch):
    plan, run = make_plan(), tmp_path / "run"
    original = files.write_file
    interrupted = threading.Event()

    def write_file(path, data):
        if "loss" in path.parts and not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)
        original(path, data)

    with (
        pytest.raises(KeyboardInterrupt),
        TrajectoryWriter.create(run, plan, {}, commit_seconds=LATER) as writer,
    ):
        writer.add(make_checkpoint(plan, 0))
        writer.add(make_checkpoint(plan, 1))
        monkeypatch.setattr(files, "write_file", write_file)
        try:
            writer.commit()
        except KeyboardInterrupt:
            assert writer.n_saved == 2
            raise
    assert_prefix(read(run), plan, 2)


def test_wrong_checkpoints_are_refused_with_all_that_is_wrong(tmp_path):
    plan = make_plan()
    good = make_checkpoint(plan, 1)
    w, b = good.parameters["W_Q"], good.parameters["b_Q"]
    with TrajectoryWriter.create(tmp_path / "run", plan, {}) as writer:

        def refused(one, *messages):
            with pytest.raises(InputError, match="checkpoint at step 5") as caught:
                writer.add(one)
            for message in messages:
                assert message in str(caught.value)

        writer.add(make_checkpoint(plan, 0))
        refused(
            replace(good, parameters={"W_Q": w[:1], "W_X": w}),
            "b_Q is missing",
            "W_X is not planned",
            "W_Q is float32 (1, 2, 3), not float32 (2, 2, 3)",
        )
        refused(replace(good, parameters={"W_Q": w.astype(float), "b_Q": b}), "W_Q is float64")
        refused(replace(good, parameters={"W_Q": w * np.inf, "b_Q": b}), "W_Q is infinite")
        refused(replace(good, loss=good.loss[:, :4]), "loss is float32 (2, 4), not float32 (2, 5)")
        refused(replace(good, loss=good.loss.tolist()), "loss is <class 'list'>")
        refused(replace(good, diverged_at=np.zeros(3)), "diverged_at is float64 (3,)")
        refused(replace(good, diverged_at=np.array([5.0, np.nan])), "not before step 5")
        refused(replace(good, diverged_at=np.array([-1.0, np.nan])), "not before step 5")
        refused(replace(good, resume={"m": np.array(["a"])}), "resume array m is <U1")
        for index in range(1, 21):
            writer.add(make_checkpoint(plan, index))
        with pytest.raises(InputError, match="all 21 planned checkpoints"):
            writer.add(good)
    assert_prefix(read(tmp_path / "run"), plan, 21)


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


def test_resume_needs_a_run_that_has_begun_and_is_whole(tmp_path):
    with pytest.raises(InputError, match="there is no"):
        TrajectoryWriter.resume(tmp_path / "none")
    run = tmp_path / "run"
    write(run, make_plan(), 3)
    state = run / resume_name(10)
    data = state.read_bytes()
    flip_bit(state, -1)
    with pytest.raises(DamagedRunError, match="checksum"):
        TrajectoryWriter.resume(run)
    state.unlink()
    with pytest.raises(DamagedRunError, match=f"{state} is missing"):
        TrajectoryWriter.resume(run)
    state.write_bytes(data)
    flip_bit(chunk(run, "b_Q"))
    with pytest.raises(DamagedRunError, match="b_Q cannot be read"):
        TrajectoryWriter.resume(run)
    assert not (run / LOCK_HOLDER).exists()


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


def test_what_a_dead_process_said_does_not_block(tmp_path):
    run = tmp_path / "run"
    write(run, make_plan(), 1)
    (run / LOCK_HOLDER).write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with TrajectoryWriter.resume(run):
        assert json.loads((run / LOCK_HOLDER).read_text())["pid"] == os.getpid()
        (run / LOCK_HOLDER).write_text("{")
        with pytest.raises(RunLockedError, match="another process is writing"):
            TrajectoryWriter.resume(run)


def saved_of(run: Path) -> int:
    try:
        return read_trajectory(run).attrs["n_saved"]
    except MechiclError:
        return 0


def test_killed_at_any_moment_and_continued(tmp_path):
    """SIGKILL a process that commits each checkpoint; what it leaves is a whole prefix."""
    n_steps, run = 4000, tmp_path / "run"
    plan = make_plan(range(n_steps + 1))
    rng = np.random.default_rng(0)
    seen = [0]
    for _ in range(5):
        command = [sys.executable, "-m", "tests.checkpoints.common", str(run), str(n_steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.readline() == b"ready\n"
                deadline = time.monotonic() + 60
                while saved_of(run) <= seen[-1]:
                    assert process.poll() is None, "it ended before it could be killed"
                    assert time.monotonic() < deadline
                time.sleep(rng.uniform(0, 0.02))  # anywhere within a commit
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
        dataset = read(run)
        seen.append(dataset.attrs["n_saved"])
        assert_prefix(dataset, plan, seen[-1])
        with TrajectoryWriter.resume(run) as writer:
            assert writer.n_saved == seen[-1]
            assert writer.resume_state["count"] == seen[-1] - 1
    assert (np.diff(seen) > 0).all()
    assert 5 <= seen[-1] < n_steps
    write(run, plan, seen[-1] + 100, start=seen[-1])
    assert_prefix(read(run), plan, seen[-1] + 100)
    assert_resume_files(run, seen[-1] + 99)
    assert read_trajectory(run).attrs["complete"] == 0
