"""No space and no more files: one sentence, nothing lost, and the same bits once there is room."""

import functools
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mechicl.errors import NothingToAnalyseError
from mechicl.run import open_run
from tests.faults.child import (
    Child,
    before_beginning,
    before_commit,
    command,
    empty,
    fill_inodes,
    fill_space,
    limit_file_size,
)
from tests.faults.common import (
    arguments,
    assert_prefix,
    assert_same_bits,
    finished,
    report,
    stored,
    train,
)

MINUTE = {"n_steps": 30, "seeds": [1, 2]}
COMMITS_OFTEN = {"chunk_steps": 4}  # and a new chunk, so a new file, each time


@pytest.fixture(scope="module")
def minute(places) -> dict:
    run = places() / "run"
    finished(train(run, settings=MINUTE))
    return stored(run)


def sentence(child: Child, code: int) -> str:
    """Return what it said, which is one sentence."""
    assert child.wait() == code, child.said()
    lines = [line for line in child.said().splitlines() if "mechicl: " in line]
    assert "Traceback" not in child.said()
    assert len(lines) == 1, child.said()
    return lines[0]


def starve(place: Path, run: Path, whole: dict, before, after) -> tuple[str, str]:
    """Let a training run into a limit, and check what it said and left, then continue it.

    Returns the part that could not be written, and the reason.
    """
    told = sentence(train_into(place, run, before=before, **COMMITS_OFTEN), 1)
    part, reason, saved = re.findall(
        r"cannot write (.+) of \S+: ([\w ]+); checkpoints up to step \d+ \((\d+) of", told
    )[0]
    assert "continue with --resume" in told
    assert assert_prefix(run, whole) == int(saved)
    after()
    assert not list(run.rglob("*.partial"))
    finished(train_into(place, run, "--resume"))
    assert_same_bits(stored(run), whole)
    return part, reason


def train_into(place: Path, run: Path, *flags: str, **limits: object) -> Child:
    """Train into `run`, on another disk than what it prints."""
    return Child(place, command, arguments(run, *flags, **MINUTE), **limits)


FILLERS = {"space": (fill_space, "size=2m"), "inodes": (fill_inodes, "nr_inodes=2000,size=8m")}


def starve_at(small_disk, place, minute, kind: str, commits, rooms) -> Counter:
    fill, options = FILLERS[kind]
    disk, seen = small_disk(options), Counter()
    for commit in commits:
        for room in rooms:
            run = disk / f"run-{commit}-{room}"
            filling = functools.partial(fill, disk, room)
            before = functools.partial(before_commit, commit, filling)
            part, reason = starve(place, run, minute, before, functools.partial(empty, disk))
            assert reason == "No space left on device"
            seen[part if part in ("loss", "n_saved") or part.startswith("W_") else "resume"] += 1
            subprocess.run(["rm", "-r", str(run)], check=True)
    return seen


@pytest.mark.parametrize("kind", FILLERS)
def test_a_full_disk(small_disk, place, minute, kind):
    assert starve_at(small_disk, place, minute, kind, [3], [0, 4]).total() == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILLERS)
def test_a_disk_that_is_full_at_any_part_of_a_commit(small_disk, place, minute, kind):
    """With a little room left, a later part of the commit is the one that fails."""
    rooms = range(8) if kind == "space" else [0, 1, 6, 7, 12, 14, 21, 25]
    seen = starve_at(small_disk, place, minute, kind, [2, 5], rooms)
    report(f"{kind}: {dict(seen)}")
    assert len(seen) >= 4


@pytest.mark.parametrize("limit", [400, 500])
def test_a_limit_on_the_size_of_a_file(place, minute, limit):
    run = place / "run"
    before = functools.partial(before_commit, 2, functools.partial(limit_file_size, limit))
    _, reason = starve(place, run, minute, before, lambda: None)
    assert reason == "File too large"


@pytest.mark.parametrize("kind", FILLERS)
@pytest.mark.parametrize("room", [0, 20])
def test_a_disk_that_is_full_when_a_run_is_begun(small_disk, place, minute, kind, room):
    fill, options = FILLERS[kind]
    disk = small_disk(options)
    run = disk / "run"
    before = functools.partial(before_beginning, functools.partial(fill, disk, room))
    told = sentence(train_into(place, run, before=before), 1)
    assert "No space left on device" in told
    empty(disk)
    if run.exists() and any(path.name == "config.yaml" for path in run.iterdir()):
        with pytest.raises(NothingToAnalyseError, match="--overwrite"):
            open_run(run)
        finished(train_into(place, run, "--overwrite"))
    else:
        finished(train_into(place, run))
    assert_same_bits(stored(run), minute)


@pytest.mark.parametrize("kind", FILLERS)
def test_a_disk_that_is_full_before_the_old_run_is_replaced(small_disk, place, minute, kind):
    fill, options = FILLERS[kind]
    disk = small_disk(options)
    run = disk / "run"
    finished(train_into(place, run))
    before = functools.partial(before_beginning, functools.partial(fill, disk, 10))
    told = sentence(train_into(place, run, "--overwrite", before=before), 1)
    assert "No space left on device" in told
    empty(disk)
    with pytest.raises(NothingToAnalyseError, match="the earlier run is in") as caught:
        open_run(run)
    (aside,) = run.glob(".replaced-*")
    assert str(aside) in str(caught.value)
    for path in aside.iterdir():
        path.replace(run / path.name)
    aside.rmdir()
    assert_same_bits(stored(run), minute)


def test_preflight_refuses_what_does_not_fit_and_makes_nothing(small_disk, place, minute):
    """It allows no run that does not fit, and refuses none that takes half of what there is."""
    finished(train(place / "run", settings=MINUTE))
    paths = [place / "run", *(place / "run").rglob("*")]
    size = sum(-(-path.stat().st_size // 4096) for path in paths if path.is_file()) * 4
    for options, words in (
        (f"size={size - 4}k", "are free"),
        (f"nr_inodes={len(paths) - 1},size=8m", "are left"),
    ):
        disk = small_disk(options)
        told = sentence(train_into(place, disk / "run"), 2)
        assert words in told
        assert "or give another directory" in told
        assert not list(disk.iterdir())
    for options in (
        f"size={2 * size + 4 * sum(path.is_dir() for path in paths)}k",
        f"nr_inodes={2 * len(paths)},size=8m",
    ):
        disk = small_disk(options)
        finished(train_into(place, disk / "run"))
        assert_same_bits(stored(disk / "run"), minute)


@pytest.mark.parametrize("kind", FILLERS)
def test_preflight_refuses_a_disk_that_is_full(small_disk, place, kind):
    fill, options = FILLERS[kind]
    disk = small_disk(options)
    fill(disk, 0)
    assert re.search("are free|are left", sentence(train_into(place, disk / "run"), 2))
    assert [path.name for path in disk.iterdir()] == ["filler"]
