"""What every test shares: strict xarray, and no thread left to chance."""

from collections.abc import Iterator

import pytest
import xarray as xr


@pytest.fixture(autouse=True)
def _strict_arithmetic() -> Iterator[None]:
    """Unequal coordinates raise instead of being intersected in silence."""
    with xr.set_options(arithmetic_join="exact"):
        yield
