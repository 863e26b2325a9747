"""A thousand runs in a study, and a thousand checkpoints as models: time, memory, open files."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import mechicl
from benchmarks.measure import QUICK

SMALL = {"n_steps": 300, "seeds": [0, 1], "every": 10, "per_decade": 0}
"""Thirty checkpoints of two seeds of two heads, d = 5."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one run and copy it a thousand times: to a study each is a run of its own."""
    root = tmp_path_factory.mktemp("runs")
    mechicl.train(QUICK, root / "run-0000", overrides=SMALL)
    for number in range(1, 1000):
        shutil.copytree(root / "run-0000", root / f"run-{number:04}")
    return root


def study(*arguments: object) -> dict[str, float]:
    """Run `mechicl study` in a new process; return its seconds, peak memory and open files."""
    command = [sys.executable, "-m", "mechicl", "study", *map(str, arguments)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    files, peak = 0, 0

    def watch() -> None:
        nonlocal files, peak
        proc = Path("/proc") / str(process.pid)
        while process.poll() is None:
            try:
                files = max(files, len(os.listdir(proc / "fd")))  # noqa: PTH208
                status = (proc / "status").read_text()
                peak = max(peak, int(status.partition("VmHWM:")[2].split()[0]))
            except (OSError, IndexError):
                pass
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    _, said = process.communicate()
    thread.join()
    assert process.returncode == 0, said.decode()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_mb": peak / 1024, "open_files": files}


@pytest.mark.parametrize(
    ("name", "pattern", "options", "limit"),
    [
        ("250 runs, in process", "run-0[01][0-9][0-9]", ["--jobs", 1], 60),
        ("1,000 runs, in process", "*", ["--jobs", 1], 60),
        ("1,000 runs, two workers", "*", ["--jobs", 2], 60),
    ],
)
def test_a_study(
    benchmark: object,
    report: Callable,
    runs: Path,
    tmp_path: Path,
    name: str,
    pattern: str,
    options: list,
    limit: float,
) -> None:
    """`mechicl study` with one trajectory probe, table and figure included."""
    out = tmp_path / "study.zarr"
    asked = [runs / pattern, "--probe", "sign_matching", "--out", out, *options]
    if pattern != "*":
        asked[:1] = [runs / pattern, runs / "run-02[0-4][0-9]"]
    figures = benchmark.pedantic(study, args=asked, rounds=1)
    report("studies", name, **figures, limit_s=limit)
    assert figures["seconds"] < limit
    assert figures["open_files"] < 100
    assert figures["peak_mb"] < 400


def test_checkpoints_as_models(benchmark: object, report: Callable, runs: Path) -> None:
    """A thousand checkpoints opened in turn; memory after the first ten and at the end."""
    run = mechicl.open_run(runs / "run-0000")

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    def opened(n: int) -> float:
        for number in range(n):
            run.model(step=int(run.steps[number % len(run.steps)]), seed=number % 2)
        return resident()

    first = opened(10)
    started = time.perf_counter()
    last = benchmark.pedantic(opened, args=[1000], rounds=1)
    seconds = time.perf_counter() - started
    report("studies", "1,000 models", seconds=seconds, first_mb=first, last_mb=last)
    assert last - first < 20
