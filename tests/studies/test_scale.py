"""Many runs and many checkpoints: nothing is left open, and memory does not grow with them."""

import gc
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mechicl
from tests import runs

N = 40
WARM = 10
MOST = 5.0
"""Megabytes that thirty runs may add: facts and paths, and nothing of their arrays."""

in_proc = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="open files are counted in /proc; lifted on Linux"
)


@pytest.fixture
def tracing() -> Iterator[None]:
    """Count what Python and NumPy allocate.

    What the system says of the process would hide it: memory that earlier tests have freed is used
    again.
    """
    tracemalloc.start()
    yield
    tracemalloc.stop()


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


def held() -> float:
    """Megabytes of Python and NumPy that are in use."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1e6


def in_models() -> float:
    """Megabytes of the weights of models that are in use, which torch allocates by itself.

    Of exactly this type: what a compiler leaves of other tests looks like tensors, and holds none.
    """
    gc.collect()
    weights = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
    return sum(each.nbytes for each in weights) / 1e6


@in_proc
@pytest.mark.usefixtures("tracing")
def test_a_study_holds_neither_files_nor_memory_of_its_runs(many: Path, tmp_path: Path) -> None:
    seen: dict[int, tuple[int, float]] = {}

    def watch(done: int, of: int) -> None:
        assert of == N
        if done in (WARM, N):
            seen[done] = (n_open(), held())

    made = mechicl.study(many, "circuits", out=tmp_path / "s.zarr", figures=False, on_done=watch)
    assert made.runs.sizes["run"] == N
    (files, memory), (more_files, more_memory) = seen[WARM], seen[N]
    assert more_files <= files + 2
    assert more_memory - memory < MOST


@pytest.mark.usefixtures("tracing")
def test_what_is_kept_of_each_run_would_be_seen(many: Path) -> None:
    """The control: results that are held on to are more than the test above allows."""
    paths = sorted(many.iterdir())
    before = held()
    kept = [mechicl.open_run(path).analyze("circuits") for path in paths[: N - WARM]]
    assert len(kept) == N - WARM
    assert held() - before > MOST


@in_proc
def test_checkpoints_opened_one_after_another_as_models_keep_nothing(tmp_path: Path) -> None:
    """Models of 0.7 MB each, so that one in four that stayed would be seen."""
    run = mechicl.open_run(runs.write(tmp_path / "run", d=150, n_steps=20))
    steps = run.steps.tolist()

    def opened(n: int) -> list[object]:
        return [run.model(step=steps[number % len(steps)], seed=0) for number in range(n)]

    for number in range(8):
        run.model(step=steps[number % len(steps)], seed=0)
    before, files = in_models(), n_open()
    for number in range(30):
        run.model(step=steps[number % len(steps)], seed=0)
    grown = in_models() - before
    assert n_open() <= files
    kept = opened(30)
    assert len(kept) == 30
    more = in_models() - before - grown
    assert more > 15, "the control: models that are held on to are seen"
    assert grown < 0.1
