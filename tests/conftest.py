"""What tests share: strict xarray, and one small trained run."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import xarray as xr

import mechicl
from mechicl.run import Run


def pytest_configure() -> None:
    """Let an interrupt reach the processes that tests start, also where a shell has it ignored.

    A shell starts what runs in the background so, and a process inherits it; one that this process
    handles is back at its default in those that it starts.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _strict_arithmetic() -> Iterator[None]:
    """Unequal coordinates raise instead of being intersected in silence."""
    with xr.set_options(arithmetic_join="exact"):
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train two seeds of the published setting: seed 0 reaches the manifold, seed 3 does not.

    Not compiled: that would take longer than the 2,000 steps.
    """
    return mechicl.train(
        "he2025-two-head-quick",
        tmp_path_factory.mktemp("runs") / "trained",
        overrides={"n_steps": 2000, "seeds": [0, 3]},
        compile=False,
    )


@pytest.fixture
def run_copy(trained: Run, tmp_path: Path) -> Path:
    """A copy of the trained run that a test may harm."""
    copy = tmp_path / "run"
    shutil.copytree(trained.path, copy)
    return copy
