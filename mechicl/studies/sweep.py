"""Sweeps: one recipe at many settings, trained one after another, and an index of what is there."""

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import pydantic

from mechicl.checkpoints import read_config
from mechicl.checkpoints.layout import CONFIG, INDECISIVE, TRAJECTORY
from mechicl.config import Config, Name, read_yaml
from mechicl.errors import (
    InputError,
    MechiclError,
    NothingToAnalyseError,
    RunLockedError,
    in_a_line,
    invalid,
)
from mechicl.paths import expanded, local_directory, outside_runs, path_text
from mechicl.results import write_aside
from mechicl.run import open_run
from mechicl.studies.trained import Watch, trained, unwatched
from mechicl.training import Recipe, load_recipe, stored_recipe
from mechicl.training.devices import require_device

INDEX = "index.csv"
"""File in a sweep's directory that lists its runs."""

_MOST_RUNS = 100_000  # a grid beyond it is a slip of the pen
_LONGEST_NAME = 80
_COLUMNS = ("run", "status", "n_saved", "n_planned", "diverged", "reason", "digest", "path")

Status = Literal["planned", "unfinished", "running", "complete", "failed"]
Settings = Mapping[str, Any]


class Sweep(Config):
    """Recipes that differ in a few settings: a grid, a list, or a grid of each entry of a list.

    Attributes
    ----------
    name
        What the sweep is called; its file's name if it has none, with - for what no name may have.
    recipe, scale
        Name of a recipe that comes with mechicl or path of a YAML file, relative to the sweep's
        own; and a size of it, such as `paper`.
    set
        Settings of every run, by key, as `load_recipe` takes them.
    grid
        Values by key: every combination is a run.
    runs
        Settings of one run each, by key; with a `grid`, of one grid each.
    """

    name: Name
    recipe: str
    scale: str | None = None
    set: dict[str, Any] = pydantic.Field(default_factory=dict)
    grid: dict[str, list[Any]] = pydantic.Field(default_factory=dict)
    runs: list[dict[str, Any]] = pydantic.Field(default_factory=list)

    @pydantic.model_validator(mode="after")
    def _has_runs(self) -> Self:
        if not self.grid and not self.runs:
            raise ValueError(
                "a sweep has a grid (values by key), runs (a list of settings), or both"
            )
        empty = [key for key, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"grid.{empty[0]} has no values")
        n_runs = max(1, len(self.runs))
        for values in self.grid.values():
            n_runs *= len(values)
        if n_runs > _MOST_RUNS:
            raise ValueError(f"the grid makes {n_runs:,} runs, and {_MOST_RUNS:,} are the most")
        return self

    def settings(self) -> list[dict[str, Any]]:
        """Return what each run sets beside `set`, the last key of the grid changing fastest.

        Raises InputError for a key that is in two of `set`, `grid` and an entry of `runs`.
        """
        chosen = []
        for entry in self.runs or [{}]:
            keys = [*self.set, *self.grid, *entry]
            twice = sorted(key for key, n in Counter(keys).items() if n > 1)
            if twice:
                raise InputError(
                    f"sweep {self.name!r}: {', '.join(twice)} is set in two of set, grid and runs"
                )
            for values in product(*self.grid.values()):
                chosen.append({**entry, **dict(zip(self.grid, values, strict=True))})
        return chosen

    def recipes(self) -> dict[str, Recipe]:
        """Return the recipe of each run by the run's name, which says what it sets.

        Raises
        ------
        InputError
            For the settings of a run that make no recipe, naming the run, and for two runs that
            would be the same.
        """
        base = load_recipe(self.recipe, self.set, scale=self.scale)
        chosen = self.settings()
        found: dict[str, Recipe] = {}
        by_digest: dict[str, str] = {}
        for name, settings in zip(_names(chosen), chosen, strict=True):
            try:
                recipe = load_recipe(base, settings).model_copy(update={"name": name})
            except InputError as error:
                raise InputError(f"sweep {self.name!r}, run {name}: {error}") from None
            if recipe.digest in by_digest:
                other = by_digest[recipe.digest]
                raise InputError(
                    f"sweep {self.name!r}: two runs set {settings}; leave one out"
                    if name == other
                    else f"sweep {self.name!r}: runs {other} and {name} are of the same settings; "
                    "leave one out"
                )
            by_digest[recipe.digest] = name
            found[name] = recipe
        return found


def load_sweep(source: str | Path) -> Sweep:
    """Read a sweep's YAML file; raise InputError for what is none, with all that is wrong in it."""
    path = expanded(path_text(source))
    name = _slug(path.stem).lstrip("-_.") or "sweep"
    settings = {"name": name, **read_yaml(path, "sweep")}
    try:
        found = Sweep.model_validate(settings)
    except pydantic.ValidationError as error:
        raise invalid(f"sweep {str(path)!r}", error, known=Sweep.model_fields) from None
    if Path(found.recipe).suffix in (".yaml", ".yml"):
        beside = path.parent / expanded(found.recipe)
        return found.model_copy(update={"recipe": str(beside)})
    return found


@dataclass(frozen=True)
class Entry:
    """A run of a sweep, as it stands.

    Attributes
    ----------
    name, path, digest
        Of the run.
    settings
        Those in which runs of the sweep differ, by dotted key; absent where a run has no such one.
    status
        `planned`: nothing is there. `unfinished`: some checkpoints are. `running`: another process
        trains it. `complete`. `failed`: see `reason`.
    n_saved, n_planned
        Checkpoints.
    diverged
        Seeds that diverged.
    reason
        Why it failed, or who trains it; else empty.
    """

    name: str
    path: Path
    digest: str
    settings: Settings
    status: Status
    n_saved: int = 0
    n_planned: int = 0
    diverged: tuple[int, ...] = ()
    reason: str = ""

    def document(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "run": self.name,
            "path": str(self.path),
            "status": self.status,
            "reason": self.reason,
            "n_saved": self.n_saved,
            "n_planned": self.n_planned,
            "diverged": list(self.diverged),
            "digest": self.digest,
            "settings": dict(self.settings),
        }


def sweep_directory(planned: Sweep, out: str | Path | None = None) -> Path:
    """Return where a sweep's runs are: `out`, or `runs/NAME`; raise InputError if in a run."""
    return outside_runs(local_directory(Path("runs") / planned.name if out is None else out))


def sweep(
    source: str | Path | Sweep,
    out: str | Path | None = None,
    *,
    device: str = "auto",
    compile: bool = True,
    watch: Watch = unwatched,
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[Entry]:
    """Train the runs of a sweep one after another, and yield what became of each.

    What is complete is left as it is, what was interrupted goes on, what failed is tried again and
    does not stop the others. Several processes, on one machine or several, may work at one sweep at
    once: each takes the runs that no other is training. The index of all runs, `index.csv` in the
    sweep's directory, is written anew after each.

    Parameters
    ----------
    source
        Path of a YAML file, or a `Sweep`.
    out
        Directory of the runs, a directory each; `runs/NAME` by default.
    device, compile
        As training takes them.
    watch, notify
        See `Watch`; and a function that is given each remark worth a line.

    Raises
    ------
    InputError
        Before anything is trained: for a sweep that is none, and for directories in `out` that hold
        runs of other recipes, naming the settings that differ.
    """
    require_device(device)
    root, recipes = _planned(source, out)
    standing = _standing(recipes, root)
    _require_same_recipes(recipes, root)
    _write_index(standing.values(), root)

    def entries() -> Iterator[Entry]:
        nonlocal standing
        for name, recipe in recipes.items():
            trouble: tuple[Status, str] | None = None
            try:
                trained(recipe, root / name, device, compile, watch, notify)
                _let_go_of_compiled_steps()
            except RunLockedError as error:
                trouble = "running", str(error)
            except (MechiclError, OSError, RuntimeError) as error:  # torch: out of memory
                trouble = "failed", in_a_line(error)
            finally:
                standing = _standing(recipes, root, known=standing, tried=name, trouble=trouble)
                _write_index(standing.values(), root)
            yield standing[name]

    return entries()


def _let_go_of_compiled_steps() -> None:
    """Free what torch keeps of every function that was compiled: some 3 MB a run."""
    if "torch" in sys.modules:  # else nothing was trained
        import torch

        torch.compiler.reset()


def sweep_index(source: str | Path | Sweep, out: str | Path | None = None) -> list[Entry]:
    """Return how the runs of a sweep stand, in its order, without training or writing anything."""
    root, recipes = _planned(source, out)
    return list(_standing(recipes, root).values())


def _planned(source: str | Path | Sweep, out: str | Path | None) -> tuple[Path, dict[str, Recipe]]:
    planned = source if isinstance(source, Sweep) else load_sweep(source)
    return sweep_directory(planned, out), planned.recipes()


def _standing(
    recipes: Mapping[str, Recipe],
    root: Path,
    *,
    known: Mapping[str, Entry] = MappingProxyType({}),
    tried: str = "",
    trouble: tuple[Status, str] | None = None,
) -> dict[str, Entry]:
    """Return how every run stands.

    A run that `known` has complete is not looked at again. What the index on disk says of a failure
    holds until the run is `tried` again, by whichever process.
    """
    differing = _differing(recipes)
    failures = _recorded_failures(root)
    found = {}
    for name, recipe in recipes.items():
        if name in known and known[name].status == "complete" and name != tried:
            found[name] = known[name]
            continue
        entry = _look(Entry(name, root / name, recipe.digest, differing[name], "planned"))
        said = trouble if name == tried else failures.get(name)
        if said is not None and entry.status != "complete":
            entry = replace(entry, status=said[0], reason=said[1])
        found[name] = entry
    return found


def _look(entry: Entry) -> Entry:
    """Return a run's entry as its directory has it."""
    if not (entry.path / TRAJECTORY).exists():
        return entry
    try:
        run = open_run(entry.path)
    except NothingToAnalyseError:  # begun, and cut short before its first commit
        return replace(entry, status="unfinished")
    except MechiclError as error:
        return replace(entry, status="failed", reason=in_a_line(error))
    return replace(
        entry,
        status="complete" if run.complete else "unfinished",
        n_saved=int(run.trajectory.attrs["n_saved"]),
        n_planned=int(run.trajectory.attrs["n_planned"]),
        diverged=tuple(run.diverged()),
    )


def _require_same_recipes(recipes: Mapping[str, Recipe], root: Path) -> None:
    """Raise InputError, naming what differs, if `root` holds runs of other recipes."""
    others = []
    for name, recipe in recipes.items():
        if not (root / name / CONFIG).exists():
            continue
        with suppress(MechiclError):  # a damaged run is told of when its turn comes
            differences = stored_recipe(read_config(root / name), root / name).differences(recipe)
            if differences:
                others.append(f"{name} ({'; '.join(differences)})")
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise InputError(
            f"{root} holds runs of other recipes: {', '.join(others[:3])}{more}; give another "
            "--out (out= in Python), or move these away"
        )


def _differing(recipes: Mapping[str, Recipe]) -> dict[str, Settings]:
    """Return, for each run, the settings in which the runs differ, by dotted key."""
    flat = {name: recipe.flat() for name, recipe in recipes.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    first = next(iter(flat.values()))
    varied = [
        key
        for key in keys
        if key not in INDECISIVE
        and any(key not in each or each[key] != first.get(key) for each in flat.values())
    ]
    return {
        name: {key: settings[key] for key in varied if key in settings}
        for name, settings in flat.items()
    }


def _names(chosen: Sequence[Settings]) -> list[str]:
    """Name runs by what they set: `n_heads-2_noise_variance-0.1`.

    A name that is too long, or that two runs would have, ends in a hash of the settings.
    """
    names = []
    for settings in chosen:
        parts = [
            f"{_slug(key.rpartition('.')[2])}-{_slug(value)}" for key, value in settings.items()
        ]
        names.append("_".join(parts).strip("-_.") or "run")
    count = Counter(name.lower() for name in names)  # some file systems tell no case apart
    return [
        name
        if len(name) <= _LONGEST_NAME and count[name.lower()] == 1
        else f"{name[: _LONGEST_NAME - 9].rstrip('-_.')}-{_hash(settings)}"
        for name, settings in zip(names, chosen, strict=True)
    ]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _slug(value: object) -> str:
    """Return a value as a part of a file's name; -1 keeps its sign."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", _text(value))
    return text.strip("-") if isinstance(value, (list, dict)) else text


def _hash(settings: Settings) -> str:
    return sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _write_index(entries: Iterable[Entry], root: Path) -> None:
    entries = list(entries)
    varied = dict.fromkeys(key for entry in entries for key in entry.settings)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*_COLUMNS, *varied])
    for entry in entries:
        document = entry.document()
        document["diverged"] = " ".join(map(str, entry.diverged))
        settings = [_text(entry.settings[key]) if key in entry.settings else "" for key in varied]
        rows.writerow([*(document[column] for column in _COLUMNS), *settings])
    try:
        write_aside(root / INDEX, lambda path: path.write_text(text.getvalue(), "utf-8"))
    except OSError as error:
        raise MechiclError(
            f"cannot write {root / INDEX} ({error.strerror or error}); --out DIR, or out= in "
            "Python, trains elsewhere"
        ) from error


def _recorded_failures(root: Path) -> dict[str, tuple[Status, str]]:
    """Return the runs that the index on disk says have failed, and why."""
    try:
        text = (root / INDEX).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    rows = csv.DictReader(io.StringIO(text))
    return {
        row["run"]: ("failed", row.get("reason") or "")
        for row in rows
        if row.get("run") and row.get("status") == "failed"
    }
