"""A small run whose every number says which checkpoint, seed and step it belongs to."""

import sys
from pathlib import Path

import numpy as np
import xarray as xr

from mechicl.checkpoints import Checkpoint, Plan, TrajectoryWriter, read_trajectory
from mechicl.checkpoints.layout import TRAJECTORY
from mechicl.schema import Var

W = Var(("seed", "step", "head", "d_model"), "1", "a matrix")
B = Var(("seed", "step"), "logit", "a bias")
SIGMA = Var((), "nat", "a constant")


def make_plan(steps=range(0, 101, 5), seeds=(0, 1), **attrs) -> Plan:
    return Plan(
        parameters={"W_Q": W, "b_Q": B},
        sizes={"head": 2, "d_model": 3},
        seeds=tuple(seeds),
        steps=np.array(steps),
        constants={"sigma": (SIGMA, 0.25)},
        attrs={"run_digest": "abc", **attrs},
    )


def losses(plan: Plan, start: int, stop: int) -> np.ndarray:
    seeds = np.array(plan.seeds)[:, None] / 10
    return (np.arange(start, stop)[None, :] + seeds).astype(np.float32)


def parameters(plan: Plan, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parameters of the checkpoints `indices`, (seed, step, ...)."""
    seeds = np.array(plan.seeds, dtype=np.float32)[:, None]
    bias = indices.astype(np.float32) + seeds / np.float32(7)
    matrix = bias[:, :, None, None] * np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    return {"W_Q": matrix, "b_Q": bias}


def make_checkpoint(plan: Plan, index: int, diverged_at=None) -> Checkpoint:
    given = {name: array[:, 0] for name, array in parameters(plan, np.array([index])).items()}
    before = plan.steps[index - 1] if index else 0
    none = np.full(len(plan.seeds), np.nan)
    return Checkpoint(
        parameters=given,
        loss=losses(plan, before, plan.steps[index]),
        diverged_at=none if diverged_at is None else np.array(diverged_at, dtype=float),
        resume={"m": given["W_Q"] * 2, "count": np.array(index)},
    )


def write(run: Path, plan: Plan, stop: int, start: int = 0, **options) -> None:
    """Write checkpoints `start` to `stop` - 1; a start of 0 makes the run."""
    writer = (
        TrajectoryWriter.resume(run, **options)
        if start
        else TrajectoryWriter.create(run, plan, {"recipe": "x"}, **options)
    )
    with writer:
        for index in range(start, stop):
            writer.add(make_checkpoint(plan, index))


def assert_prefix(dataset: xr.Dataset, plan: Plan, n_saved: int) -> None:
    """All that `dataset` holds is what the first `n_saved` checkpoints gave, bit for bit."""
    assert dataset.attrs["n_saved"] == n_saved == dataset.sizes["step"]
    last = int(plan.steps[n_saved - 1])
    np.testing.assert_array_equal(dataset["step"], plan.steps[:n_saved])
    np.testing.assert_array_equal(dataset["log_step"], np.arange(last))
    np.testing.assert_array_equal(dataset["seed"], plan.seeds)
    for name, expected in parameters(plan, np.arange(n_saved)).items():
        assert dataset[name].dtype == np.float32
        np.testing.assert_array_equal(dataset[name], expected)
    np.testing.assert_array_equal(dataset["loss"], losses(plan, 0, last))


def flip_bit(path: Path, position: int = 10) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def chunk(run: Path, name: str) -> Path:
    """Return the first chunk file of an array."""
    first = run / TRAJECTORY / name / "c"
    while first.is_dir():
        first /= "0"
    return first


def child(run: str, n_steps: str, every: str = "0") -> None:
    """Write or continue a run, committing at each checkpoint; for tests that kill this process."""
    path, plan = Path(run), make_plan(range(int(n_steps) + 1))
    writer = (
        TrajectoryWriter.resume(path, commit_seconds=float(every))
        if (path / TRAJECTORY).exists()
        else TrajectoryWriter.create(path, plan, {"recipe": "x"}, commit_seconds=float(every))
    )
    with writer:
        print("ready", flush=True)  # noqa: T201
        for index in range(writer.n_saved, len(plan.steps)):
            writer.add(make_checkpoint(plan, index))


def read(run: Path) -> xr.Dataset:
    return read_trajectory(run).load()


if __name__ == "__main__":
    child(*sys.argv[1:])
