"""Readers beside a writer, and writers beside a writer, each in a process of its own."""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from mechicl.checkpoints import read_trajectory
from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.run import open_run
from tests.faults.child import Child
from tests.faults.common import (
    assert_prefix,
    assert_same_bits,
    finished,
    report,
    stored,
    train,
)


def read_on(run: Path, whole: dict[str, np.ndarray], told: Path) -> None:
    """Read `run` whole again and again until it is complete; say in `told` what was seen."""
    seen: list[int] = []
    n_early = 0
    while not seen or seen[-1] < len(whole["step"]):
        try:
            held = read_trajectory(run).load() if len(seen) % 2 else open_run(run).trajectory.load()
        except (NothingToAnalyseError, InputError):
            if seen:
                raise
            n_early += 1
            continue
        n_saved = held.attrs["n_saved"]
        assert n_saved >= (seen[-1] if seen else 1)
        last = int(whole["step"][n_saved - 1])
        for name, value in held.variables.items():
            length = {"step": n_saved, "log_step": last}
            where = tuple(slice(length.get(dim)) for dim in value.dims)
            assert value.values.tobytes() == whole[str(name)][where].tobytes(), (name, n_saved)
        assert set(held.variables) == set(whole)
        seen.append(n_saved)
    told.write_text(json.dumps({"seen": seen, "n_early": n_early}))


def readers(run: Path, whole: dict, number: int) -> list[tuple[Child, Path]]:
    files = [run.parent / f"told-{index}.json" for index in range(number)]
    return [(Child(run.parent, read_on, run, whole, told), told) for told in files]


def reads(running: list[tuple[Child, Path]]) -> tuple[list[int], set[int]]:
    """Return how often each reader has read, and every `n_saved` that was seen."""
    reports = []
    for child, told in running:
        finished(child)
        reports.append(json.loads(told.read_text()))
    return [len(each["seen"]) for each in reports], {n for each in reports for n in each["seen"]}


def test_a_reader_beside_the_writer_sees_whole_prefixes_alone(place, whole):
    running = readers(place / "run", whole, 1)
    finished(train(place / "run", commit_seconds=0.0))
    counts, seen = reads(running)
    assert sum(counts) >= 5
    assert len(seen) >= 3


@pytest.mark.slow
def test_readers_beside_writers_that_are_killed_and_continued(places, whole):
    n_reads, n_kills, prefixes = 0, 0, set()
    for limits in ({"commit_seconds": 0.0}, {"chunk_steps": 3}, {"commit_seconds": 0.05}) * 3:
        run = places() / "run"
        running = readers(run, whole, 2)
        child = train(run, **limits)
        while not list(run.glob("resume-*.safetensors")):
            time.sleep(0.005)
        for _ in range(3):
            time.sleep(0.3)
            if child.kill() == 0:
                break
            n_kills += 1
            child = train(run, "--resume" if begun(run) else "--overwrite", **limits)
        finished(child)
        counts, seen = reads(running)
        n_reads, prefixes = n_reads + sum(counts), prefixes | seen
        assert_same_bits(stored(run), whole)
        shutil.rmtree(run.parent)
    report(f"{n_reads} reads saw {len(prefixes)} different prefixes beside {n_kills} kills")
    assert n_reads > 200
    assert len(prefixes) > 30


def begun(run: Path) -> bool:
    try:
        open_run(run)
    except NothingToAnalyseError:
        return False
    return True


def test_a_second_training_is_refused_and_disturbs_nothing(place, whole):
    run = place / "run"
    first = train(run, commit_seconds=0.0)
    while not list(run.glob("resume-*.safetensors")):
        time.sleep(0.005)
    os.kill(first.process.pid, signal.SIGSTOP)
    for flag in ("--resume", "--overwrite"):
        second = train(run, flag)
        assert second.wait() == 1
        who = f"process {first.process.pid} on {socket.gethostname()} is writing {run}"
        assert who in second.said()
        assert "Traceback" not in second.said()
    os.kill(first.process.pid, signal.SIGCONT)
    finished(first)
    assert_same_bits(stored(run), whole)


@pytest.mark.slow
def test_of_trainings_begun_at_once_one_goes_on(places, whole):
    for _ in range(8):
        run = places() / "run"
        both = [train(run, commit_seconds=0.0) for _ in range(3)]
        codes = [child.wait() for child in both]
        assert codes.count(0) == 1, [child.said() for child in both]
        for code, child in zip(codes, both, strict=True):
            assert code in (0, 1, 2)
            assert "Traceback" not in child.said()
            if code:
                assert "is writing" in child.said() or "there is a run in" in child.said()
        assert_prefix(run, whole)
        assert_same_bits(stored(run), whole)
        shutil.rmtree(run.parent)
