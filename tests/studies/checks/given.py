"""Runs whose probes say what they are told to, and what checks make of them."""

from typing import Any

import numpy as np
import xarray as xr


class GivenRun:
    """Stands for a run whose probes say what they are told to."""

    def __init__(self, result: xr.Dataset, loss: np.ndarray | None = None) -> None:
        self._result = result
        self.metrics = xr.Dataset()
        if loss is not None:
            self.metrics = xr.Dataset({"loss": (("seed", "log_step"), loss)})
        self.asked: dict[str, Any] = {}

    def analyze(self, name: str, **settings: Any) -> xr.Dataset:
        self.asked = {"name": name, **settings}
        return self._result


def by_quantity(outcome: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in outcome.measurements:
        found.setdefault(each.quantity, []).append(each.value)
    return found
