"""SIGKILL at random moments and at every single operation: nothing that was committed is lost."""

import functools
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mechicl.checkpoints.layout import CONFIG, REPLACED, TRAJECTORY, resume_name
from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.run import open_run
from tests.faults.child import (
    BEGINNING,
    COMMITTING,
    Child,
    kill_at_operation,
    limit_file_size,
)
from tests.faults.common import assert_prefix, assert_same_bits, finished, report, stored, train


def n_saved_of(run: Path, whole: dict) -> int:
    """Return the number of checkpoints in `run`, all of them checked; 0 if it says it has none."""
    try:
        open_run(run)
    except (NothingToAnalyseError, InputError) as error:
        assert any(
            word in str(error)
            for word in (
                "not begun",
                "no checkpoint yet",
                "is empty",
                "there is no",
                "is not a run",
                "was cut short",
            )
        ), error
        return 0
    return assert_prefix(run, whole)


def go_on(run: Path, **limits: object) -> Child:
    """Continue `run` as its messages say: resume it or, where it has not begun, train again."""
    begun = (run / TRAJECTORY).exists()
    flag = ["--resume"] if begun else ["--overwrite"] if (run / CONFIG).exists() else []
    return train(run, *flag, **limits)


def time_of(run: Path, planned: int) -> float:
    """Return the seconds that a run takes from its start to its last commit."""
    started = time.monotonic()
    child = train(run, commit_seconds=0.0)
    while not (run / resume_name(planned - 1)).exists():
        assert child.process.is_alive()
        time.sleep(0.005)
    duration = time.monotonic() - started
    finished(child)
    return duration


def kill_at_random(places, whole, n_kills: int) -> list[dict]:
    """Kill trainings, begun or continued, and finish each store in the end; return every kill."""
    rng = random.Random(0)
    planned = len(whole["step"])
    duration = time_of(places() / "run", planned)
    kills: list[dict] = []
    run, saved, n_stores = places() / "run", 0, 1
    limits = {"commit_seconds": 0.0}

    def end(run: Path) -> None:
        finished(go_on(run))
        assert_same_bits(stored(run), whole)
        shutil.rmtree(run.parent)

    while len(kills) < n_kills:
        resumed = saved > 0
        child = go_on(run, **limits)
        time.sleep(rng.uniform(0, 1) * duration * (1 - saved / planned))
        code = child.kill()
        if code == 0:  # it was done before the kill
            assert_same_bits(stored(run), whole)
            saved = planned
        else:
            assert code == -signal.SIGKILL, child.said()
            before, saved = saved, n_saved_of(run, whole)
            assert saved >= before
            kills.append({"n_saved": saved, "resumed": resumed, "phase": child.phase})
        if saved == planned or rng.random() < 0.5:
            end(run)
            run, saved, n_stores = places() / "run", 0, n_stores + 1
            limits = rng.choice([{"commit_seconds": 0.0}, {"chunk_steps": 4}])
    if run.exists():
        end(run)
    inside = sum(0 < kill["n_saved"] < planned for kill in kills)
    counts = [kill["n_saved"] for kill in kills]
    report(
        f"{len(kills)} kills of {n_stores} stores with {planned} checkpoints planned: "
        f"{inside} strictly inside, {sum(kill['resumed'] for kill in kills)} of a resumed run, "
        f"{sum(kill['phase'] == COMMITTING for kill in kills)} inside a commit, "
        f"{sum(kill['phase'] == BEGINNING for kill in kills)} while the run was begun; "
        f"n_saved quartiles {np.percentile(counts, [0, 25, 50, 75, 100]).tolist()}\n"
        f"n_saved of each: {counts}"
    )
    return kills


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_kills_at_random(places, whole):
    kills = kill_at_random(places, whole, 100)
    inside = [kill for kill in kills if 0 < kill["n_saved"] < len(whole["step"])]
    assert len(kills) == 100
    assert len(inside) > 60
    assert sum(kill["resumed"] for kill in inside) >= 20
    assert sum(kill["phase"] == COMMITTING for kill in inside) >= 20
    assert len({kill["n_saved"] for kill in inside}) > 20


def test_some_kills_at_random(places, whole):
    kills = kill_at_random(places, whole, 6)
    assert any(0 < kill["n_saved"] < len(whole["step"]) for kill in kills)


def operations(trace: Path) -> list[str]:
    return trace.read_text().splitlines()


def committed(done: list[str]) -> int:
    """Return how many commits have counted: `n_saved` is put in place once more at each."""
    return done.count(f"os.rename {TRAJECTORY}/n_saved/c")


def killed_at(number: int, run: Path, *flags: str, settings: dict, limit: float) -> list[str]:
    """Train until the `number`-th change in `run`, killed there; return the changes before it."""
    trace = run.parent / "trace"
    before = functools.partial(kill_at_operation, run, number, trace)
    child = train(run, *flags, settings=settings, commit_seconds=limit, before=before)
    assert child.wait() == (-signal.SIGKILL if number else 0), child.said()
    done = operations(trace)
    return done[: number - 1] if number else done


SHORT = {"n_steps": 3, "seeds": [1, 2]}


@pytest.fixture(scope="module")
def short(places):
    """The short run that was never stopped, and every change of a file that it makes."""
    run = places() / "run"
    done = killed_at(0, run, settings=SHORT, limit=0.0)
    assert committed(done) == 4
    return stored(run), done


def kill_everywhere(places, short, numbers: list[int]) -> Counter:
    """Kill a training at each of `numbers`; it keeps what was committed, and can go on."""
    whole, _ = short
    seen: Counter = Counter()
    for number in numbers:
        run = places() / "run"
        before = killed_at(number, run, settings=SHORT, limit=0.0)
        n_saved = n_saved_of(run, whole)
        assert n_saved == committed(before), before
        seen[n_saved] += 1
        finished(go_on(run, settings=SHORT))
        assert_same_bits(stored(run), whole)
        assert not list(run.rglob("*.partial"))
        assert [path.name for path in run.glob("resume-*")] == [resume_name(3)]
        shutil.rmtree(run.parent)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_before_and_after_every_change_of_a_file(places, short):
    """Within the making of the empty store every fifth is enough: nothing can be opened yet."""
    done = short[1]
    making = [n for n, line in enumerate(done, 1) if f"{TRAJECTORY}.partial/" in line]
    numbers = sorted({*range(1, len(done) + 1)} - {*making} | {*making[::5]})
    seen = kill_everywhere(places, short, numbers)
    report(f"{seen.total()} places of {len(done)}; n_saved and how often: {dict(seen)}")
    assert set(seen) == {0, 1, 2, 3, 4}
    assert seen[0] > 40
    assert min(seen[n_saved] for n_saved in (1, 2, 3)) > 10


def test_killed_around_what_makes_a_commit_count(places, short):
    done = short[1]
    second = [n for n, line in enumerate(done, 1) if line == f"os.rename {TRAJECTORY}/n_saved/c"][1]
    assert done[second].startswith("os.remove resume-0")
    assert kill_everywhere(places, short, [second, second + 1]) == {1: 1, 2: 1}


OTHER = {"n_steps": 4, "seeds": [7]}


def overwrite_killed(places, numbers: list[tuple[int, ...]]) -> Counter:
    """Kill `--overwrite` at the changes named, one attempt after another; nothing is lost."""
    old = places() / "run"
    finished(train(old, settings=OTHER))
    (old / "notes.txt").write_text("mine")
    old_whole, new = stored(old), places() / "run"
    finished(train(new, settings=SHORT))
    new_whole = stored(new)
    seen: Counter = Counter()
    for attempts in numbers:
        run = places() / "run"
        shutil.copytree(old, run)
        for number in attempts:
            killed_at(number, run, "--overwrite", settings=SHORT, limit=0.0)
        try:
            held = open_run(run)
        except NothingToAnalyseError as error:
            if "no checkpoint yet" in str(error):
                seen["new, begun"] += 1
                finished(train(run, "--resume", settings=SHORT))
                assert_same_bits(stored(run), new_whole)
            else:
                seen["old, set aside"] += 1
                (place,) = re.findall(r"the earlier run is in (\S+):", str(error))
                copy = places() / "run"
                shutil.copytree(run, copy)
                for path in (copy / Path(place).name).iterdir():
                    path.replace(copy / path.name)
                assert_same_bits(stored(copy), old_whole)
                finished(train(copy, "--resume", settings=OTHER))
                shutil.rmtree(copy.parent)
        else:
            if held.seeds.tolist() == OTHER["seeds"]:
                seen["old, in place"] += 1
                assert_same_bits(stored(run), old_whole)
                finished(train(run, "--resume", settings=OTHER))
            else:
                seen["new, with checkpoints"] += 1
                assert_prefix(run, new_whole)
                finished(train(run, "--resume", settings=SHORT))
                assert not list(run.glob(f"{REPLACED}*"))
        finished(train(run, "--overwrite", settings=SHORT))
        assert_same_bits(stored(run), new_whole)
        assert not list(run.glob(f"{REPLACED}*"))
        assert not list(run.rglob("*.partial"))
        assert (run / "notes.txt").read_text() == "mine"
        shutil.rmtree(run.parent)
    return seen


@pytest.fixture(scope="module")
def replacing(places) -> list[str]:
    """Every change of a file that `--overwrite` makes, up to its first commit."""
    run = places() / "run"
    finished(train(run, settings=OTHER))
    done = killed_at(0, run, "--overwrite", settings=SHORT, limit=0.0)
    return done[: done.index(f"os.rename {TRAJECTORY}/n_saved/c") + 2]


def phases(replacing: list[str]) -> tuple[list[int], list[int]]:
    """Split the changes into those of the run directory itself, and those of stores within it."""
    names = [line.split()[1] for line in replacing]
    inner = [
        number
        for number, name in enumerate(names, 1)
        if name.startswith(f"{TRAJECTORY}.partial/")
        or (replacing[number - 1].startswith(("os.remove ", "os.rmdir ")) and "resume" not in name)
    ]
    return [n for n in range(1, len(names) + 1) if n not in inner], inner


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_overwriting_killed_anywhere_keeps_the_old_run_or_has_begun_the_new(places, replacing):
    outer, inner = phases(replacing)
    seen = overwrite_killed(places, [(number,) for number in [*outer, *inner[::8]]])
    report(f"{seen.total()} places of {len(replacing)}: {dict(seen)}")
    assert set(seen) == {
        "old, in place",
        "old, set aside",
        "new, begun",
        "new, with checkpoints",
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_overwriting_killed_twice_or_thrice_keeps_the_old_run(places, replacing):
    """Also where a later attempt finds what an earlier one had half set aside."""
    begun = replacing.index(f"os.rename {TRAJECTORY}")
    numbers = [n for n in phases(replacing)[0] if 5 <= n <= begun + 1]
    pairs = [(one, two) for one in numbers for two in numbers]
    rng = random.Random(0)
    chosen = [*rng.sample(pairs, 25), *(tuple(rng.choices(numbers, k=3)) for _ in range(5))]
    seen = overwrite_killed(places, chosen)
    report(f"{seen.total()} sequences: {dict(seen)}")
    assert seen["old, set aside"] > 15


def test_an_overwriting_killed_twice_keeps_the_old_run_whole_and_in_one_place(places, replacing):
    """The first kill moved the trajectory alone, the second what was left."""
    moved = replacing.index("os.rename config.yaml") + 1
    aside = next(n for n, line in enumerate(replacing, 1) if line.startswith("os.mkdir .replaced"))
    seen = overwrite_killed(places, [(aside + 2, moved), (aside + 1, aside + 3)])
    assert seen == {"old, set aside": 2}


@pytest.mark.parametrize("limit", [100, 300, 700])
def test_killed_in_the_middle_of_a_file(places, short, limit):
    """Half a file is nothing: it never has the name of a whole one."""
    run = places() / "run"
    finished(train(run, settings={**SHORT, "n_steps": 1}, commit_seconds=0.0))
    assert stored(run)
    before = functools.partial(limit_file_size, limit, kill=True)
    run = places() / "run"
    child = train(run, settings=SHORT, before=before)
    assert child.wait() == -signal.SIGXFSZ
    assert [path.stat().st_size for path in run.rglob("*.partial") if path.is_file()] == [limit]
    assert n_saved_of(run, short[0]) == 0
    finished(go_on(run, settings=SHORT))
    assert_same_bits(stored(run), short[0])
