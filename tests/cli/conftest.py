"""What tests of the shell share: a run of their own."""

from pathlib import Path

import pytest

import mechicl


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two updates."""
    path = tmp_path_factory.mktemp("cli") / "run"
    small = {"d": 2, "n_context": 5, "batch_size": 8, "n_steps": 2, "seeds": [0]}
    mechicl.train("he2025-two-head-quick", path, overrides=small, compile=False)
    return path
