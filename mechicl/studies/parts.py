"""Parts of a study: one probe over one run, each a file that is there whole or not at all.

What computes a part may be another process or another machine: it is told paths and settings, and
tells what became of it. Results go through the disk.
"""

import inspect
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mechicl import analyses
from mechicl.checkpoints import fingerprint
from mechicl.checkpoints.reader import Location
from mechicl.errors import InputError, NothingToAnalyseError, in_a_line
from mechicl.results import write_aside
from mechicl.run import Run, open_run
from mechicl.version import __version__

Kind = Literal["failed", "does not apply"]
FAILED: Kind = "failed"
DOES_NOT_APPLY: Kind = "does not apply"

_ENDING = ".safetensors"
_FACTS = "run.json"
_SOME = 3
"""So many runs are named of those that one reason is of."""


@dataclass(frozen=True)
class Job:
    """What is to be computed of one run.

    Attributes
    ----------
    run
        Absolute path of the run, or its URL.
    folder
        Where its parts go.
    probes
        Parameters of each probe that is wanted, defaults included, by name.
    keys
        What tells the results of a probe from those of other settings, by probe (see `keys_of`).
    against
        Paths of other runs by name, for comparative probes.
    """

    run: str
    folder: str
    probes: Mapping[str, Mapping[str, Any]]
    keys: Mapping[str, str]
    against: Mapping[str, str]

    def part(self, probe: str) -> Path:
        """Return the file of one probe's result."""
        return Path(self.folder) / f"{probe}-{self.keys[probe]}{_ENDING}"

    @property
    def facts(self) -> Path:
        """The file that says what run it is."""
        return Path(self.folder) / _FACTS

    def only(self, probes: Sequence[str]) -> "Job":
        """Return the same of some of the probes."""
        return replace(self, probes={name: self.probes[name] for name in probes})

    def missing(self) -> list[str]:
        """Return the probes whose parts are not there, all of them where the run is not known."""
        if _read_json(self.facts) is None:
            return list(self.probes)
        return [name for name in self.probes if read_head(self.part(name)) is None]


@dataclass(frozen=True)
class Failure:
    """A run, or a probe over it, that gave nothing.

    Attributes
    ----------
    run
        Path of the run.
    probe
        Empty where the run could not be opened.
    kind
        `failed`, or `does not apply`.
    reason
        In words.
    """

    run: str
    probe: str
    kind: Kind
    reason: str


def by_reason(failures: Sequence[Failure]) -> list[str]:
    """Return a line for each reason, with the first of the runs that it is of."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in failures:
        groups.setdefault((each.probe, each.kind, each.reason), []).append(each.run)
    lines = []
    for (probe, kind, reason), runs in groups.items():
        more = f" and {len(runs) - _SOME} more runs" if len(runs) > _SOME else ""
        lines.append(
            f"{', '.join(runs[:_SOME])}{more}: {probe + ' ' if probe else ''}{kind}: {reason}"
        )
    return lines


def keys_of(probes: Mapping[str, Mapping[str, Any]], against: Mapping[str, str]) -> dict[str, str]:
    """Hash what decides numbers beside the run: each probe as it is written, and its settings."""
    others = {name: [run, fingerprint(run)] for name, run in against.items()}
    keys = {}
    for name, parameters in probes.items():
        probe = analyses.get(name)
        known = [__version__, parameters, _source(probe), others if probe.comparative else None]
        text = json.dumps(known, sort_keys=True, default=str)
        keys[name] = sha256(text.encode()).hexdigest()[:16]
    return keys


def folder_of(run: Location, root: Path) -> Path:
    """Return the folder of the parts of a run in `root`, named by its path and its last commit.

    Folders of earlier commits of the same run are removed.
    """
    place, commit = sha256(str(run).encode()).hexdigest()[:16], fingerprint(run)
    for old in root.glob(f"{place}-*"):
        if old.name != f"{place}-{commit}":
            shutil.rmtree(old, ignore_errors=True)
    return root / f"{place}-{commit}"


def compute(asked: Job) -> list[Failure]:
    """Compute the parts of a job one after another, and return what failed.

    Whatever goes wrong with a run or a probe is told and stops nothing else. Parts of probes that
    do not apply are written too: they say so.
    """
    try:
        run = open_run(asked.run)
        _write_json(asked.facts, facts_of(run))
    except Exception as error:
        return [Failure(asked.run, "", _kind(error, of_probe=False), in_a_line(error))]
    return [
        failure for name in asked.probes if (failure := _compute_one(asked, run, name)) is not None
    ]


def compute_pinned(asked: Job) -> list[Failure]:
    """Do what `compute` does in a worker process: one thread each for OpenMP, BLAS and torch."""
    pin_threads(torch=any(analyses.get(name).forward for name in asked.probes))
    return compute(asked)


def pin_threads(*, torch: bool) -> None:
    """Let numerical libraries of this process use one thread; several workers share the machine."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    if torch:  # which is imported for probes that evaluate models, and for no others
        import_module("torch").set_num_threads(1)


def _compute_one(asked: Job, run: Run, name: str) -> Failure | None:
    try:
        reason = run.objection(name)
        if reason is None:
            against = asked.against if analyses.get(name).comparative else None
            result = run.analyze(name, against=against, **asked.probes[name])
            write_part(asked.part(name), result)
            return None
        _write_refusal(asked.part(name), reason)
    except (NothingToAnalyseError, InputError) as error:
        return Failure(asked.run, name, _kind(error, of_probe=True), in_a_line(error))
    except Exception as error:
        return Failure(asked.run, name, FAILED, in_a_line(error))
    return Failure(asked.run, name, DOES_NOT_APPLY, reason)


def _kind(error: Exception, *, of_probe: bool) -> Kind:
    """Tell a run that is wrong for a probe, or for a setting such as its hook, from a fault."""
    refused = (NothingToAnalyseError, InputError) if of_probe else NothingToAnalyseError
    return DOES_NOT_APPLY if isinstance(error, refused) else FAILED


def facts_of(run: Run) -> dict[str, Any]:
    """Return what a study says of a run besides results: its settings, and how far it got."""
    attrs = run.trajectory.attrs
    return {
        "settings": run.recipe.settings(),
        "run_digest": attrs["run_digest"],
        "n_saved": int(attrs["n_saved"]),
        "n_planned": int(attrs["n_planned"]),
        "last_step": int(run.steps[-1]),
        "complete": int(run.complete),
        "n_diverged": len(run.diverged()),
    }


def read_facts(asked: Job) -> dict[str, Any] | None:
    """Return what `facts_of` said of the run of a job, or None if it was never opened."""
    return _read_json(asked.facts)


def write_part(path: Path, result: xr.Dataset) -> None:
    """Write a probe's result into one file; plain dims, attributes of JSON types."""
    head = {
        "attrs": result.attrs,
        "coords": [str(name) for name in result.coords],
        "variables": {
            str(name): {"dims": list(variable.dims), "attrs": variable.attrs}
            for name, variable in result.variables.items()
        },
    }
    arrays = {
        str(name): np.array(variable.values, order="C")
        for name, variable in result.variables.items()
    }
    _save(path, arrays, head)


def _write_refusal(path: Path, reason: str) -> None:
    _save(path, {}, {"refusal": reason})


def _save(path: Path, arrays: dict[str, np.ndarray], head: Mapping[str, Any]) -> None:
    metadata = {key: json.dumps(value, default=_plain) for key, value in head.items()}
    write_aside(path, lambda aside: save_file(arrays, aside, metadata=metadata))


def read_head(path: Path) -> dict[str, Any] | None:
    """Return attributes, coordinates and variables of a part, or its `refusal`.

    None where there is no part, or what is there was cut short.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            return {key: _parsed(text) for key, text in metadata.items()} or None
    except (OSError, SafetensorError, ValueError):
        return None


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Any:
    """Read JSON; runs that say the same share it, so that a thousand heads take little memory."""
    return json.loads(text)


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Open a part; `get_tensor(name)` reads one of its variables."""
    with safe_open(path, framework="numpy") as file:
        yield file


def _plain(value: Any) -> Any:
    """Return what JSON has no type for: numbers and arrays of NumPy."""
    return value.tolist()


def _source(probe: analyses.Probe) -> str:
    """Hash the file that a probe is written in, so that one that was changed is computed again."""
    try:
        text = Path(inspect.getfile(probe.compute)).read_bytes()
    except (OSError, TypeError):
        return ""
    return sha256(text).hexdigest()[:16]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, default=_plain)
    write_aside(path, lambda aside: aside.write_text(text, encoding="utf-8"))
