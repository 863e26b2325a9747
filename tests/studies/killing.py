"""What workers of tests run in place of jobs: it ends their process, or asks about it."""

import os
import sys
from pathlib import Path

from mechicl.studies.parts import Failure, Job, compute_pinned, pin_threads


def compute(job: Job) -> list[Failure]:
    """End the process for a run called `always`, and the first time for one called `once`."""
    name, marker = Path(job.run).name, Path(job.folder).parent / "killed"
    if name == "always" or (name == "once" and not marker.exists()):
        if name == "once":
            marker.touch()
        os._exit(1)
    return compute_pinned(job)


def threads() -> tuple[int, str]:
    """Return how many threads torch uses in a pinned process, and OpenMP's setting."""
    pin_threads(torch=True)
    return sys.modules["torch"].get_num_threads(), os.environ["OMP_NUM_THREADS"]
