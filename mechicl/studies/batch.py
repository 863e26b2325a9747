"""Jobs of a study, in this process, on a Dask cluster of this machine, or on any other.

Only paths and what became of them travel: a job's results are files. At most a few jobs a worker
are in flight, whatever their number.
"""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mechicl.errors import InputError, MechiclError, in_a_line, integer
from mechicl.studies.parts import FAILED, Failure, Job, compute, compute_pinned

if TYPE_CHECKING:
    from distributed import Client

_PER_WORKER = 3
_TIMEOUT = 10.0
"""Seconds within which a scheduler answers."""
_WORKERS_TIMEOUT = 60.0
"""Seconds within which it has a worker: a queue of a cluster may be longer, a notebook is not."""

OnDone = Callable[[int, int], None]
"""Is called with the number of runs that are done, and of all."""


def check_workers(jobs: int, scheduler: str | None) -> None:
    """Raise InputError for a number of jobs that is none, or a scheduler given beside one."""
    integer("jobs", jobs, 1)
    if scheduler is not None and (not isinstance(scheduler, str) or not scheduler.strip()):
        raise InputError(f"a scheduler is an address, such as tcp://HOST:8786; given {scheduler!r}")
    if scheduler is not None and jobs != 1:
        raise InputError(
            f"--jobs {jobs} starts workers here, and --scheduler {scheduler} has its own; give one"
        )


def run_jobs(
    asked: Sequence[Job],
    *,
    jobs: int = 1,
    scheduler: str | None = None,
    on_done: OnDone = lambda done, of: None,
    timeout: float = _TIMEOUT,
) -> list[Failure]:
    """Compute jobs, and return what failed.

    Parameters
    ----------
    asked
        One a run.
    jobs
        Worker processes of this machine; 1 computes in this process.
    scheduler
        Address of a Dask scheduler whose workers compute instead; they need mechicl, and the same
        paths.
    on_done
        See `OnDone`.
    timeout
        Seconds within which `scheduler` answers.

    Raises
    ------
    MechiclError
        If the scheduler does not answer, or has no worker.
    """
    if not asked:
        return []
    if scheduler is None and jobs == 1:
        failures: list[Failure] = []
        for number, each in enumerate(asked, start=1):
            failures += compute(each)
            on_done(number, len(asked))
        return failures
    with connected(min(jobs, len(asked)), scheduler, timeout) as client:
        return _on_workers(client, asked, on_done)


@contextmanager
def connected(jobs: int, scheduler: str | None, timeout: float = _TIMEOUT) -> "Iterator[Client]":
    """Yield a client of a cluster: of `jobs` processes with a thread each, or of `scheduler`."""
    opened = _local(jobs) if scheduler is None else _remote(scheduler, timeout)
    with opened as client:
        yield client


@contextmanager
def _local(jobs: int) -> "Iterator[Client]":
    from dask.config import set as configured
    from distributed import Client, LocalCluster, WorkerPlugin

    class Undisturbed(WorkerPlugin):
        """Leaves an interrupt from the terminal to the process that asked, which ends workers."""

        def setup(self, worker: object) -> None:
            del worker
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    # A job that ends its worker is tried again by itself, once, and then given up.
    settings: dict[str, Any] = {
        "distributed.scheduler.allowed-failures": 1,
        "distributed.worker.multiprocessing-method": "spawn",
        # Results are on disk: there is nothing to spill, and a worker that waited would for ever.
        "distributed.worker.memory.pause": False,
    }
    with (
        configured(settings),
        LocalCluster(
            n_workers=jobs,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,  # type: ignore[arg-type]
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(Undisturbed())
        yield client


@contextmanager
def _remote(address: str, timeout: float) -> "Iterator[Client]":
    from distributed import Client

    hint = (
        "see that `dask scheduler` runs there, that the address and port are its own, and that no "
        "firewall is between; --jobs N needs none"
    )
    try:
        client = Client(address, timeout=timeout)
    except (OSError, TimeoutError) as error:
        raise MechiclError(
            f"the scheduler {address} does not answer within {timeout:g} s ({error}): {hint}"
        ) from None
    except (ValueError, TypeError) as error:  # TypeError: what tls:// or ucx:// needs is not set
        raise InputError(
            f"{address!r} is no address of a scheduler that can be used here ({error}); give one "
            "such as tcp://HOST:8786"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=_WORKERS_TIMEOUT)
        except TimeoutError:
            raise MechiclError(
                f"the scheduler {address} has had no worker for {_WORKERS_TIMEOUT:g} s; start some "
                f"with `dask worker {address} --nthreads 1`"
            ) from None
        yield client


def _on_workers(client: "Client", asked: Sequence[Job], on_done: OnDone) -> list[Failure]:
    """Compute jobs on a cluster; what ended a worker is tried once more, a probe at a time."""
    failures: list[Failure] = []
    ended: list[Job] = []
    for number, (each, outcome) in enumerate(_outcomes(client, asked, _width(client)), start=1):
        if isinstance(outcome, Exception):
            ended.append(each)
        else:
            failures += outcome
        on_done(number - len(ended), len(asked))
    # With nothing beside it, a job that ends its worker does so by itself.
    alone = [each.only([name]) for each in ended for name in each.missing()]
    for each, outcome in _outcomes(client, alone, width=1):
        if isinstance(outcome, Exception):
            (probe,) = each.probes
            failures.append(Failure(each.run, probe, FAILED, _ended(outcome)))
        else:
            failures += outcome
    if ended:
        on_done(len(asked), len(asked))
    return list(dict.fromkeys(failures))


def _width(client: "Client") -> int:
    threads: dict[str, int] = client.nthreads()  # type: ignore[assignment]
    return max(_PER_WORKER * sum(threads.values()), 2)


def _outcomes(
    client: "Client", asked: Sequence[Job], width: int
) -> "Iterator[tuple[Job, list[Failure] | Exception]]":
    """Yield each job with what it returned or raised, as they end, `width` at a time."""
    from distributed import as_completed

    waiting = iter(asked)
    futures: dict[Any, Job] = {}

    def submit() -> Any:
        each = next(waiting, None)
        if each is None:
            return None
        future = client.submit(compute_pinned, each, pure=False)
        futures[future.key] = each
        return future

    first = [future for _ in range(width) if (future := submit()) is not None]
    ended = as_completed(first)
    for future in ended:
        each = futures.pop(future.key)
        error = future.exception() if future.status == "error" else None
        outcome = future.result() if future.status == "finished" else error
        if outcome is None:
            outcome = MechiclError("the scheduler gave the job up")
        future.release()
        following = submit()
        if following is not None:
            ended.add(following)
        yield each, outcome


def _ended(error: Exception) -> str:
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        return (
            "its worker process ended every time that it was computed: it was killed, as for want "
            "of memory, or crashed"
        )
    return in_a_line(error)
