"""Shared by the benchmarks: the published setting, and where figures for the report are put."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mechicl.tasks.linear_regression import LinearRegression


@pytest.fixture
def task() -> LinearRegression:
    """Return the published setting: d = 5, L = 40, σ² = 0.1."""
    return LinearRegression()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return where a benchmark may train."""
    return tmp_path / "run"


@pytest.fixture
def report(benchmark: object) -> Callable[..., None]:
    """Add a row to the report: `report(section, name, **figures)`."""

    def add(section: str, name: str, **figures: object) -> None:
        rows = benchmark.extra_info.setdefault("rows", [])  # type: ignore[attr-defined]
        rows.append({"section": section, "name": name, **figures})

    return add
