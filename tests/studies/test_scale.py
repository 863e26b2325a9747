"""Many runs and many checkpoints: nothing is left open, and memory does not grow with them."""

import gc
import os
import shutil
from pathlib import Path

import pytest

import mechicl
from tests import runs

N = 40
WARM = 10
MOST = 5.0
"""Megabytes that thirty runs may add: facts and paths, and nothing of their arrays."""

in_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="files and memory are read in /proc (Linux)"
)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of one run, whose circuits take 0.4 MB."""
    root = tmp_path_factory.mktemp("scale")
    runs.write(root / "run-0", n_steps=300, checkpoints={"every": 1, "per_decade": 0})
    for number in range(1, N):
        shutil.copytree(root / "run-0", root / f"run-{number}")
    return root


def n_open() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def resident() -> float:
    """Megabytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@in_proc
def test_a_study_holds_neither_files_nor_memory_of_its_runs(many: Path, tmp_path: Path) -> None:
    seen: dict[int, tuple[int, float]] = {}

    def watch(done: int, of: int) -> None:
        assert of == N
        if done in (WARM, N):
            seen[done] = (n_open(), resident())

    made = mechicl.study(many, "circuits", out=tmp_path / "s.zarr", figures=False, on_done=watch)
    assert made.runs.sizes["run"] == N
    (files, memory), (more_files, more_memory) = seen[WARM], seen[N]
    assert more_files <= files + 2
    assert more_memory - memory < MOST


@in_proc
def test_what_is_kept_of_each_run_would_be_seen(many: Path) -> None:
    """The control: results that are held on to are more than the test above allows."""
    paths = sorted(many.iterdir())
    before = resident()
    kept = [mechicl.open_run(path).analyze("circuits") for path in paths[: N - WARM]]
    assert len(kept) == N - WARM
    assert resident() - before > MOST


@in_proc
def test_checkpoints_opened_one_after_another_as_models_keep_nothing(tmp_path: Path) -> None:
    """Models of 0.7 MB each, so that one in four that stayed would be seen."""
    run = mechicl.open_run(runs.write(tmp_path / "run", d=150, n_steps=20))
    steps = run.steps.tolist()

    def opened(n: int) -> list[object]:
        return [run.model(step=steps[number % len(steps)], seed=0) for number in range(n)]

    for number in range(8):
        run.model(step=steps[number % len(steps)], seed=0)
    before, files = resident(), n_open()
    for number in range(30):
        run.model(step=steps[number % len(steps)], seed=0)
    grown = resident() - before
    assert n_open() <= files
    kept = opened(30)
    held = resident() - before - grown
    assert len(kept) == 30
    assert held > 15, "the control: models that are held on to are seen"
    assert grown < held / 4
