"""The shell as its users wait for it: whole processes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mechicl
from benchmarks.measure import QUICK, seconds

TRAJECTORY_PROBES = (
    "circuits",
    "head_roles",
    "homogeneous_kq",
    "sign_matching",
    "solution_manifold",
    "zero_sum_ov",
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the demo run."""
    path = tmp_path_factory.mktemp("demo") / "run"
    mechicl.train(QUICK, path)
    return path


def shell(*arguments: object) -> None:
    """Run mechicl in a new process."""
    command = [sys.executable, "-m", "mechicl", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "arguments", "limit"),
    [
        ("mechicl --help", ["--help"], 0.5),
        ("mechicl info RUN", ["info", "RUN"], 1.0),
        (
            "mechicl analyze RUN, the six trajectory probes, no figures",
            ["analyze", "RUN", "--no-plot", *(f"--probe={name}" for name in TRAJECTORY_PROBES)],
            3.0,
        ),
        (
            "mechicl analyze RUN --probe sign_matching",
            ["analyze", "RUN", "--probe=sign_matching"],
            3,
        ),
    ],
)
def test_waits(
    benchmark: object, report: Callable, demo: Path, name: str, arguments: list, limit: float
) -> None:
    """Wall seconds of a command on the demo run, least of five."""
    filled = [str(demo) if argument == "RUN" else argument for argument in arguments]
    wall = min(seconds(lambda: shell(*filled)) for _ in range(5))
    benchmark.pedantic(shell, args=filled, rounds=1)
    report("shell", name, seconds=wall, limit_s=limit)
    assert wall < limit


def test_a_forward_probe(benchmark: object, report: Callable, demo: Path) -> None:
    """20,000 prompts over 50 checkpoints of 4 seeds."""
    run = mechicl.open_run(demo)

    def measure() -> None:
        run.analyze("approximate_loss", n_prompts=20_000, n_steps=50)

    wall = seconds(measure)
    benchmark.pedantic(measure, rounds=1)
    report("shell", "20,000 prompts, 50 checkpoints, 4 seeds", seconds=wall, limit_s=30)
    assert wall < 30
