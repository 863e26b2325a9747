"""A small training, as the shell starts it, and what its store must hold."""

from pathlib import Path

import numpy as np
import xarray as xr
import zarr

from mechicl.checkpoints import read_trajectory
from mechicl.checkpoints.layout import TRAJECTORY
from mechicl.run import open_run
from tests.faults.child import Child, command

PARAMETERS = ("W_Q", "W_K", "W_V", "W_O")
SETTINGS = {"d": 2, "n_context": 5, "batch_size": 16, "learning_rate": 0.01, "every": 1}


def arguments(run: Path, *flags: str, **settings: object) -> list[str]:
    """Return what follows `python -m mechicl` to train the small task into `run`."""
    chosen = {**SETTINGS, "n_steps": 100, "seeds": [3, 5, 8], **settings}
    pairs = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    name = "he2025-two-head-quick"
    return ["train", name, "--out", str(run), "--no-compile", *pairs, *flags]


def train(run: Path, *flags: str, settings: dict | None = None, **limits: object) -> Child:
    """Start to train the small task; `limits` are those of `command`."""
    return Child(run.parent, command, arguments(run, *flags, **(settings or {})), **limits)


def finished(child: Child, code: int = 0) -> Child:
    assert child.wait() == code, child.said()
    assert "Traceback" not in child.said()
    return child


def report(text: str) -> None:
    """Say what was counted; `pytest -s` shows it."""
    print(f"\n{text}")  # noqa: T201


def stored(run: Path) -> dict[str, np.ndarray]:
    return {str(name): v.values for name, v in read_trajectory(run).variables.items()}


def assert_same_bits(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert value.shape == second[name].shape, name
        assert value.tobytes() == second[name].tobytes(), name


def assert_prefix(run: Path, whole: dict[str, np.ndarray]) -> int:
    """Assert that `run` holds the beginning of `whole`, and nothing else; return its `n_saved`."""
    found = open_run(run).trajectory
    n_saved = found.attrs["n_saved"]
    last = int(whole["step"][n_saved - 1])
    assert 0 < n_saved <= len(whole["step"])
    names = [name for name in whole if whole[name].ndim > 2]
    assert sorted(names) == sorted(PARAMETERS)
    for name in names:
        assert np.isfinite(found[name].values).all()
        assert found[name].values.tobytes() == whole[name][:, :n_saved].tobytes(), name
    assert np.isfinite(found["loss"].values).all()
    assert found["loss"].values.tobytes() == whole["loss"][:, :last].tobytes()

    # As plain Zarr and xarray see it: the chunk of the prefix may hold more, never less.
    plain = zarr.open_group(run / TRAJECTORY, mode="r")
    assert int(plain["n_saved"][...]) == n_saved
    for name in names:
        assert np.isfinite(plain[name][:, :n_saved]).all()
        chunk = plain[name].chunks[1]
        beyond = -(-n_saved // chunk) * chunk
        assert np.isnan(plain[name][:, beyond + chunk :]).all(), name
    xr.open_zarr(run / TRAJECTORY, chunks=None).close()
    return n_saved
