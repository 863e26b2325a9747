"""Mechanistic interpretability of in-context learning in small transformers."""

from importlib import import_module
from typing import TYPE_CHECKING

from mechicl.version import __version__

if TYPE_CHECKING:
    from mechicl.run import Run as Run
    from mechicl.run import import_run as import_run
    from mechicl.run import open_run as open_run
    from mechicl.run import train as train
    from mechicl.studies.report import report as report
    from mechicl.studies.study import Study as Study
    from mechicl.studies.study import open_study as open_study
    from mechicl.studies.study import study as study
    from mechicl.studies.sweep import sweep as sweep
    from mechicl.studies.sweep import sweep_index as sweep_index

_LAZY = {
    "Run": "mechicl.run",
    "Study": "mechicl.studies.study",
    "import_run": "mechicl.run",
    "open_run": "mechicl.run",
    "open_study": "mechicl.studies.study",
    "report": "mechicl.studies.report",
    "study": "mechicl.studies.study",
    "sweep": "mechicl.studies.sweep",
    "sweep_index": "mechicl.studies.sweep",
    "train": "mechicl.run",
}
__all__ = [
    "Run",
    "Study",
    "__version__",
    "import_run",
    "open_run",
    "open_study",
    "report",
    "study",
    "sweep",
    "sweep_index",
    "train",
]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for, so that `import mechicl` costs nothing."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mechicl' has no attribute {name!r}")
