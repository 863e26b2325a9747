import errno
import os
import signal
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
    read_trajectory,
)
from mechicl.checkpoints import writer as writing
from mechicl.checkpoints.layout import (
    LOCK_HOLDER,
    TRAJECTORY,
    resume_name,
)
from mechicl.errors import (
    DamagedRunError,
    InputError,
    MechiclError,
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
