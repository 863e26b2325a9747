"""Whatever the schedule, seeds, chunks and stops: what is read is what training gave."""

import functools
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mechicl.checkpoints import Checkpoint, TrajectoryWriter, layout, read_trajectory
from mechicl.training import load_recipe
from mechicl.training.loop import Progress, train
from tests.faults.common import SETTINGS

_WITHIN = HealthCheck.function_scoped_fixture


class Recorder:
    """Stands where the loop expects the writer, and keeps what the loop gives to it."""

    given: dict[int, Checkpoint]

    def __init__(self, monkeypatch, commit_seconds: float) -> None:
        self.given = {}
        add = TrajectoryWriter.add

        def recorded(writer: TrajectoryWriter, checkpoint: Checkpoint) -> None:
            self.given[int(checkpoint.resume()["step"])] = checkpoint
            add(writer, checkpoint)

        monkeypatch.setattr(TrajectoryWriter, "add", recorded)
        for begin in (TrajectoryWriter.create, TrajectoryWriter.resume):
            defaults = {**begin.__func__.__kwdefaults__, "commit_seconds": commit_seconds}
            monkeypatch.setattr(begin.__func__, "__kwdefaults__", defaults)


def assert_holds(run: Path, given: dict[int, Checkpoint], steps: np.ndarray) -> None:
    held = read_trajectory(run).load()
    np.testing.assert_array_equal(held["step"], steps)
    for name in given[0].parameters:
        expected = np.stack([given[step].parameters[name] for step in steps], 1)
        assert held[name].values.tobytes() == expected.tobytes(), name
    loss = np.concatenate([given[step].loss for step in steps], 1)
    assert held["loss"].values.tobytes() == loss.tobytes()
    diverged_at = given[steps[-1]].diverged_at
    np.testing.assert_array_equal(held["diverged_at"], diverged_at)


@settings(max_examples=12, deadline=None, suppress_health_check=[_WITHIN])
@given(
    n_steps=st.integers(1, 40),
    every=st.integers(1, 9),
    per_decade=st.integers(0, 6),
    at=st.lists(st.integers(0, 40), max_size=3),
    seeds=st.lists(st.integers(0, 2**40), min_size=1, max_size=4, unique=True),
    n_cores=st.integers(1, 3),
    chunk_steps=st.integers(1, 8),
    chunk_log_steps=st.integers(1, 30),
    chunk_bytes=st.sampled_from([16, 64, 2**24]),
    commit_seconds=st.sampled_from([0.0, 1e9]),
    stops=st.lists(st.integers(0, 39), max_size=3),
)
def test_what_is_read_is_what_training_gave(
    places,
    n_steps,
    every,
    per_decade,
    at,
    seeds,
    n_cores,
    chunk_steps,
    chunk_log_steps,
    chunk_bytes,
    commit_seconds,
    stops,
):
    """Through the loop, stopped and resumed wherever, beside a run that is never stopped."""
    schedule = {
        "every": every,
        "per_decade": per_decade,
        "at": sorted({min(n, n_steps) for n in at}),
    }
    changes = {
        **{key: value for key, value in SETTINGS.items() if key != "every"},
        **{"n_steps": n_steps, "seeds": seeds},
        **{f"checkpoints.{key}": value for key, value in schedule.items()},
    }
    recipe = load_recipe("he2025-two-head-quick", changes)
    steps = recipe.checkpoints.steps(n_steps)
    folder = places()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: n_cores)
        whole = Recorder(patch, commit_seconds)
        train(recipe, folder / "whole", compile=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: n_cores)
        patch.setattr(layout, "MAX_CHUNK_STEPS", chunk_steps)
        patch.setattr(layout, "MAX_CHUNK_LOG_STEPS", chunk_log_steps)
        patch.setattr(layout, "MAX_CHUNK_BYTES", chunk_bytes)
        Recorder(patch, commit_seconds)
        run, begun = folder / "run", False
        for stop in sorted(stops):
            reached: list[int] = []
            interrupt = functools.partial(_interrupt, stop, reached)
            try:
                train(recipe, run, compile=False, resume=begun, on_progress=interrupt)
            except KeyboardInterrupt:
                begun = True
                assert_holds(run, whole.given, steps[steps <= reached[-1]])
                plain = xr.open_zarr(run / layout.TRAJECTORY, chunks=None)
                for name in whole.given[0].parameters:
                    assert np.isnan(plain[name][:, steps > reached[-1]]).all()
                assert np.isnan(plain["loss"][:, reached[-1] :]).all()
            else:
                begun = True
        train(recipe, run, compile=False, resume=begun)
    assert_holds(folder / "whole", whole.given, steps)
    assert_holds(run, whole.given, steps)


def _interrupt(stop: int, reached: list[int], progress: Progress) -> None:
    reached.append(progress.step)
    if progress.step >= stop:
        raise KeyboardInterrupt
