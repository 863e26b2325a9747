"""What workers of tests run in place of jobs: it ends their process, or asks about it."""

import os
import sys
from pathlib import Path

from mechicl.studies.parts import Failure, Job, compute_pinned, pin_threads

KILLER = "killer"


def always(job: Job) -> list[Failure]:
    """End the process for a run of that name, every time."""
    if KILLER in job.run:
        os._exit(1)
    return compute_pinned(job)


def once(job: Job) -> list[Failure]:
    """End the process for a run of that name, the first time."""
    marker = Path(job.folder).parent / "killed"
    if KILLER in job.run and not marker.exists():
        marker.touch()
        os._exit(1)
    return compute_pinned(job)


def threads() -> tuple[int, str]:
    """Return how many threads torch uses in a pinned process, and OpenMP's setting."""
    pin_threads(torch=True)
    return sys.modules["torch"].get_num_threads(), os.environ["OMP_NUM_THREADS"]
