"""Places to break runs in, and the run that nothing happened to."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faults.common import finished, stored, train

_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def places() -> Iterator[Callable[[], Path]]:
    """Make new folders, in memory if there is a file system there.

    A kill does not lose what was written but not flushed, so disks add time alone.
    """
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mechicl-faults-", dir=base) as folder:
        yield lambda: Path(tempfile.mkdtemp(dir=folder))


@pytest.fixture
def place(places: Callable[[], Path]) -> Path:
    return places()


@pytest.fixture(scope="session")
def whole(places: Callable[[], Path]) -> dict[str, np.ndarray]:
    """What a run of the small task holds if it is never stopped."""
    run = places() / "whole"
    finished(train(run))
    return stored(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system in memory of the size and number of files that the test asks for."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        disk = tmp_path / f"disk-{len(mounted)}"
        disk.mkdir()
        told = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)],
            capture_output=True,
            text=True,
        )
        if told.returncode:
            pytest.skip(f"may not mount a small disk ({told.stderr.strip()}); lifted for root")
        mounted.append(disk)
        return disk

    try:
        yield mount
    finally:
        for disk in mounted:
            subprocess.run(["umount", str(disk)], check=True)
