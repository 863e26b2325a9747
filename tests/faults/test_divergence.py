"""Seeds that diverge beside seeds that do not, killed and resumed."""

import time

import numpy as np
import pytest

from mechicl.run import open_run
from tests.faults.common import PARAMETERS, assert_same_bits, stored, train

# The weights grow by a twentieth a step: within these steps some seeds overflow, others do not yet.
STEEP = {"optimizer.name": "adamw", "learning_rate": 1e3, "optimizer.weight_decay": 2.05e-3}
STEEP |= {"n_steps": 99, "seeds": [0, 1, 2, 3, 4, 5]}


def ended(run, *flags, **limits):
    child = train(run, *flags, settings=STEEP, **limits)
    assert child.wait() == 1, child.said()
    assert "diverged at step" in child.said()
    assert "Traceback" not in child.said()


@pytest.fixture(scope="module")
def steep(places):
    run = places() / "run"
    ended(run)
    held = stored(run)
    at = held["diverged_at"]
    gone = np.isfinite(at)
    assert 0 < gone.sum() < len(gone), f"choose another length: {at}"
    for name in PARAMETERS:
        finite = np.isfinite(held[name]).reshape(*held[name].shape[:2], -1).all(-1)
        np.testing.assert_array_equal(finite, ~(held["step"] > at[:, None]))
    return held


def kill_along(run, steep, pauses) -> list[int]:
    """Kill the training once in each pause after the last, and return where it was each time."""
    saved: list[int] = []
    at = steep["diverged_at"]
    for pause in pauses:
        flags = ["--resume"] if saved else []
        child = train(run, *flags, settings=STEEP, commit_seconds=0.0)
        until = (saved[-1] if saved else 0) + pause
        while not any(int(p.stem.split("-")[1]) >= until for p in run.glob("resume-*.safetensors")):
            assert child.process.is_alive()
            time.sleep(0.002)
        child.kill()
        held = open_run(run).trajectory
        saved.append(held.attrs["n_saved"])
        step = int(held["step"][-1])
        np.testing.assert_array_equal(held["diverged_at"], np.where(at < step, at, np.nan))
        for name in (*PARAMETERS, "loss"):
            length = saved[-1] if name in PARAMETERS else step
            assert held[name].values.tobytes() == steep[name][:, :length].tobytes()
    ended(run, "--resume")
    assert_same_bits(stored(run), steep)
    return saved


def test_divergence_killed_and_resumed(place, steep):
    first = int(np.nanmin(steep["diverged_at"]))
    saved = kill_along(place / "run", steep, [first - 9, 3])
    assert saved[0] < len(steep["step"])


@pytest.mark.slow
def test_divergence_killed_and_resumed_often(places, steep):
    for pauses in ([18] * 4, [90, 1, 1, 1, 1], [94, 1, 1]):
        assert len(kill_along(places() / "run", steep, pauses)) == len(pauses)
