"""A small run and its page, for all tests of pages."""

import shutil
from pathlib import Path

import pytest

import mechicl
from mechicl.run import Run
from mechicl.studies.report import Report, report
from tests.studies.report.pages import EVIL


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two seeds of a tiny setting, in a directory and with a description that are no HTML."""
    path = tmp_path_factory.mktemp("pages") / f"a run {EVIL}"
    small = {"d": 2, "n_context": 5, "batch_size": 16, "n_steps": 40, "seeds": [0, 3]}
    overrides = small | {"description": f"two heads {EVIL}", "checkpoints": {"every": 5}}
    return mechicl.train("he2025-two-head-quick", path, overrides=overrides, compile=False)


@pytest.fixture(scope="session")
def made(small: Run) -> Report:
    """Its page, with the probes that need no forward pass."""
    return report(small)


@pytest.fixture
def small_copy(small: Run, made: Report, tmp_path: Path) -> Path:
    """A copy of the run, with its results and its page, that a test may harm."""
    copy = tmp_path / "copy"
    shutil.copytree(made.path.parent, copy)
    return copy
