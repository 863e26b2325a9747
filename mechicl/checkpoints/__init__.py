"""The trajectory of a run on disk: when to save, where it lies, how it is written and read.

Arrays alone: this layer knows no task, no model and no torch.
"""

from mechicl.checkpoints.findings import Finding
from mechicl.checkpoints.layout import SCHEMA_VERSION, Plan, allocate
from mechicl.checkpoints.reader import (
    fingerprint,
    load,
    read_config,
    read_trajectory,
    require_run,
)
from mechicl.checkpoints.schedule import Schedule
from mechicl.checkpoints.verify import verify
from mechicl.checkpoints.writer import Checkpoint, TrajectoryWriter

__all__ = [
    "SCHEMA_VERSION",
    "Checkpoint",
    "Finding",
    "Plan",
    "Schedule",
    "TrajectoryWriter",
    "allocate",
    "fingerprint",
    "load",
    "read_config",
    "read_trajectory",
    "require_run",
    "verify",
]
