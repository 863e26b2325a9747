"""Jobs in this process and on workers: what fails, what is killed, what does not answer."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import mechicl
from mechicl.errors import InputError, MechiclError
from mechicl.studies import batch
from mechicl.studies.parts import Job, folder_of, keys_of
from tests import runs
from tests.studies import killing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

PROBES = {"sign_matching": {"dummy_threshold": 0.2}}


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write(tmp_path_factory.mktemp("one") / "run")


@pytest.fixture(scope="module")
def client() -> "Iterator[Client]":
    with batch.connected(2, None) as client:
        yield client


def jobs_of(one_run: Path, root: Path, *names: str) -> list[Job]:
    """Copies of a run by these names, and their jobs."""
    keys = keys_of(PROBES, {})
    found = []
    for name in names:
        shutil.copytree(one_run, root / name)
        folder = folder_of(root / name, root / "parts")
        found.append(Job(str(root / name), str(folder), PROBES, keys, {}))
    return found


def test_a_worker_that_is_killed_costs_its_part_and_no_other(
    client: "Client", one_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = jobs_of(one_run, tmp_path, "a", "always", "once", "d")
    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(batch, "compute_pinned", killing.compute)
    done = []
    (failure,) = batch._on_workers(client, asked, lambda n, of: done.append((n, of)))
    assert (failure.run, failure.probe) == (asked[1].run, "sign_matching")
    assert failure.kind == "failed"
    assert "its worker process ended every time" in failure.reason
    assert (tmp_path / "parts" / "killed").exists(), "the other one was not killed"
    assert [each.missing() for each in asked] == [[], list(PROBES), [], []]
    assert done[-1] == (4, 4)


def test_workers_use_a_thread_each(client: "Client") -> None:
    assert client.submit(killing.threads, pure=False).result(timeout=60) == (1, "1")
    assert set(client.nthreads().values()) == {1}


def test_few_jobs_are_in_flight(
    client: "Client", one_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are submitted only as others end."""
    asked = jobs_of(one_run, tmp_path, *"abcdefgh")
    submitted, ended, most = 0, 0, 0
    submit = client.submit

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal submitted, most
        submitted += 1
        most = max(most, submitted - ended)
        return submit(*args, **kwargs)

    monkeypatch.setattr(client, "submit", counting)
    for _, outcome in batch._outcomes(client, asked, width=3):
        assert outcome == []
        ended += 1
    assert (submitted, ended) == (8, 8)
    assert most <= 4


def test_an_external_scheduler_computes(client: "Client", one_run: Path, tmp_path: Path) -> None:
    asked = jobs_of(one_run, tmp_path, "a", "b")
    address = client.scheduler.address
    assert batch.run_jobs(asked, scheduler=address) == []
    assert [each.missing() for each in asked] == [[], []]


def test_a_scheduler_that_does_not_answer_is_said(one_run: Path, tmp_path: Path) -> None:
    asked = jobs_of(one_run, tmp_path, "a")
    with pytest.raises(MechiclError, match=r"does not answer within 0\.3 s .*dask scheduler"):
        batch.run_jobs(asked, scheduler="tcp://127.0.0.1:9", timeout=0.3)
    with pytest.raises(InputError, match="is no address of a scheduler"):
        batch.run_jobs(asked, scheduler="nonsense://x", timeout=0.3)
    with pytest.raises(InputError, match=r"tls://127\.0\.0\.1:9' is no address .*TLS"):
        batch.run_jobs(asked, scheduler="tls://127.0.0.1:9", timeout=0.3)


@pytest.mark.parametrize(
    ("jobs", "scheduler", "said"),
    [
        (0, None, "jobs is an integer from 1"),
        (True, None, "jobs is an integer"),
        (1.5, None, "jobs is an integer"),
        (2, "tcp://x:1", "give one"),
        (1, " ", "a scheduler is an address"),
    ],
)
def test_wrong_numbers_of_workers(jobs: object, scheduler: str | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        batch.check_workers(jobs, scheduler)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_keeps_what_is_done(one_run: Path, tmp_path: Path, jobs: int) -> None:
    names = [f"run-{number:02}" for number in range(24)]
    asked = jobs_of(one_run, tmp_path, *names)
    out = tmp_path / "s.zarr"
    command = [sys.executable, "-m", "mechicl", "study", str(tmp_path / "run-*"), "--no-plot"]
    options = ["--probe", "sign_matching", "--out", str(out), "--jobs", str(jobs)]
    process = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    parts, deadline = tmp_path / "s-parts", time.monotonic() + 90
    while len(list(parts.glob("*/*.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "the same command goes on" in said
    assert "KeyboardInterrupt" not in said, "a traceback"
    finished = {path: path.stat().st_mtime_ns for path in parts.glob("*/*.safetensors")}
    assert 2 <= len(finished) < len(names)
    assert not out.exists()
    made = mechicl.study([job.run for job in asked], "sign_matching", out=out, figures=False)
    assert made.runs.sizes["run"] == len(names)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
