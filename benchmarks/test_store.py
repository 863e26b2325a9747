"""The store: what saving costs, and reading beside a folder of state dicts."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import mechicl
from benchmarks.baselines import circuits_of_state_dicts, save_state_dicts
from benchmarks.measure import QUICK, Rate, in_turns, seconds
from mechicl.checkpoints import Checkpoint, Plan, TrajectoryWriter
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.training import Recipe, load_recipe
from mechicl.training.loop import plan_run, run_config, train


def write_run(path: Path, recipe: Recipe, parameters: Mapping[str, np.ndarray]) -> Plan:
    """Write a complete run whose checkpoints are `parameters`, times their number."""
    plan = plan_run(recipe)
    n_seeds, diverged = len(recipe.seeds), np.full(len(recipe.seeds), np.nan)
    with TrajectoryWriter.create(path, plan, run_config(recipe, [[0]], "cpu")) as writer:
        before = 0
        for step in plan.steps.tolist():
            loss = np.ones((n_seeds, step - before), np.float32)
            scale = np.float32(1 + 1e-6 * step)
            weights = {name: value * scale for name, value in parameters.items()}
            writer.add(Checkpoint(weights, loss, diverged, {"step": np.array(step)}))
            before = step
    return plan


def random_parameters(recipe: Recipe) -> dict[str, np.ndarray]:
    """One checkpoint of every seed, random."""
    sizes, rng = recipe.model.sizes(recipe.task), np.random.default_rng(0)
    return {
        name: rng.normal(size=(len(recipe.seeds), *(sizes[dim] for dim in var.dims[2:]))).astype(
            np.float32
        )
        for name, var in recipe.model.parameters(recipe.task).items()
    }


def test_saving_every_ten_steps(benchmark: object, report: Callable, run_dir: Path) -> None:
    """Training with a checkpoint every 10 steps beside training with two checkpoints in all."""

    def rate(every: int) -> float:
        settings = {"n_steps": 2000, "every": every, "per_decade": 0}
        measured = Rate()
        train(load_recipe(QUICK, settings), run_dir, overwrite=True, on_progress=measured)
        return measured.value

    rate(2000)
    turns = in_turns(lambda: rate(10), lambda: rate(2000))
    report(
        "store", "4 seeds, saving every 10 steps beside hardly ever, seed-steps/s", **turns.row()
    )
    benchmark.pedantic(lambda: rate(10), rounds=1)
    assert turns.ratio > 0.95


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 checkpoints of 8 seeds of the published model."""
    path = tmp_path_factory.mktemp("large") / "run"
    settings = {"n_steps": 9999, "every": 1, "per_decade": 0, "seeds": list(range(8))}
    recipe = load_recipe(QUICK, settings)
    write_run(path, recipe, random_parameters(recipe))
    return path


def test_reading_beside_state_dicts(
    benchmark: object,
    report: Callable,
    task: LinearRegression,
    large: Path,
    tmp_path: Path,
) -> None:
    """Circuits of every checkpoint: a probe, and a loop over 500 state dicts scaled up."""
    n_saved = 500
    paths = save_state_dicts(tmp_path / "saved", task, 2, n_saved)
    circuits_of_state_dicts(paths[:10], task, 2)
    mechicl.open_run(large).analyze("circuits")

    def ours() -> float:
        return 80_000 / seconds(lambda: mechicl.open_run(large).analyze("circuits"))

    def theirs() -> float:
        return n_saved / seconds(lambda: circuits_of_state_dicts(paths, task, 2))

    turns = in_turns(ours, theirs)
    report("store", "circuits, checkpoints/s beside state dicts", **turns.row())
    probe = min(seconds(lambda: mechicl.open_run(large).analyze("sign_matching")) for _ in range(3))
    opening = min(seconds(lambda: mechicl.open_run(large)) for _ in range(5))
    files = sum(len(names) for _, _, names in os.walk(large))
    report(
        "store",
        "10,000 checkpoints of 8 seeds",
        files=files,
        open_ms=1e3 * opening,
        sign_matching_s=probe,
        circuits_s=80_000 / turns.ours,
    )
    benchmark.pedantic(lambda: mechicl.open_run(large).analyze("sign_matching"), rounds=3)
    assert files <= 1000
    assert opening < 0.05
    assert probe < 1
    assert turns.ratio > 100


_ANALYZE = """
import sys
from pathlib import Path
import mechicl
mechicl.open_run(sys.argv[1]).analyze("sign_matching")
# Not getrusage: a child's ru_maxrss starts from what its parent held.
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
print(int(peak.split()[1]) / 2**20)
"""


def test_a_trajectory_larger_than_memory_allows(
    benchmark: object, report: Callable, tmp_path: Path
) -> None:
    """A 4 GB trajectory, analysed by a process that stays below 1 GB."""
    settings = {"d": 31, "n_heads": 4, "seeds": list(range(8)), "n_steps": 7700, "every": 1}
    recipe = load_recipe(QUICK, settings | {"per_decade": 0})
    plan = write_run(tmp_path / "run", recipe, random_parameters(recipe))
    peaks: list[float] = []

    def measure() -> None:
        done = subprocess.run(
            [sys.executable, "-c", _ANALYZE, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(float(done.stdout))

    benchmark.pedantic(measure, rounds=1)
    report(
        "store",
        "sign_matching over a trajectory larger than memory",
        trajectory_gb=plan.nbytes / 1e9,
        peak_gb=max(peaks),
        seconds=benchmark.stats["mean"],  # type: ignore[attr-defined]
    )
    assert plan.nbytes > 4e9
    assert max(peaks) < 1
