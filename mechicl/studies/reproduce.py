"""Reproducing claims: train or reuse the runs, measure, and write down what came out."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from mechicl import plots
from mechicl.errors import DamagedRunError, InputError, MechiclError
from mechicl.paths import local_directory, outside_runs
from mechicl.results import write_aside
from mechicl.run import Run
from mechicl.studies import checks
from mechicl.studies.checks import Measurement
from mechicl.studies.claims import Claim, Verdict, chosen, load_claim, verdict, wilson
from mechicl.studies.trained import Watch, trained, unwatched
from mechicl.training import Recipe, load_recipe
from mechicl.training.devices import require_device
from mechicl.version import __version__


@dataclass(frozen=True)
class Quantity:
    """One quantity of a claim: published and measured.

    Attributes
    ----------
    name, published, tolerance
        As in the claim; None where it is measured without counting for the verdict.
    measurements
        One for each seed, or a single one.
    n_counted, n_met
        Seeds that the claim speaks of, and those that met it.
    interval
        Wilson's 95 % interval of n_met / n_counted.
    verdict
        None without a published value.
    """

    name: str
    published: float | None
    tolerance: float | None
    measurements: tuple[Measurement, ...]
    n_counted: int
    n_met: int
    interval: tuple[float, float]
    verdict: Verdict | None

    @property
    def counted(self) -> np.ndarray:
        """Values of the seeds that count."""
        return np.array([each.value for each in self.measurements if not each.excluded])


@dataclass(frozen=True)
class Record:
    """What became of a claim.

    Attributes
    ----------
    claim
        As it was read.
    verdict
        `reproduced`: every quantity, on every seed that counts. `not reproduced`: some quantity on
        none. Else `partly`.
    quantities
        Those published, in the claim's order, then the others.
    runs
        Directory of each run, by label.
    seconds
        Wall time, training left out.
    figure
        Where it is; None where none was asked for.
    """

    claim: Claim
    verdict: Verdict
    quantities: tuple[Quantity, ...]
    runs: Mapping[str, Path]
    seconds: float
    figure: Path | None

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON types, NaN as None."""
        return _plain(
            {
                "claim": self.claim.model_dump(mode="json"),
                "verdict": self.verdict,
                "quantities": [asdict(each) for each in self.quantities],
                "runs": {label: str(path) for label, path in self.runs.items()},
                "seconds": self.seconds,
                "figure": None if self.figure is None else str(self.figure),
                "mechicl_version": __version__,
            }
        )


def reproduce(
    asked: str | Sequence[str],
    out: str | Path = "runs/reproduce",
    *,
    scale: str | None = None,
    device: str = "auto",
    compile: bool = True,
    figure: bool = True,
    watch: Watch = unwatched,
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[Record]:
    """Test claims one after another, and yield what became of each.

    Runs are kept in `out/runs`, named by recipe and settings: a run that is there is reused by
    every claim that needs it, and one that was interrupted goes on. Records go to
    `out/claims/ID.json` and `ID.png`.

    Parameters
    ----------
    asked
        Ids, names of papers, `all`, or paths of YAML files.
    out
        Directory of runs and records.
    scale
        Size of the recipes, such as `paper`; None takes the recipes' own.
    device, compile
        As training takes them.
    figure
        Whether figures are drawn.
    watch, notify
        See `Watch`; and a function that is given each remark worth a line.

    Raises
    ------
    InputError
        Before anything is trained: an unknown claim, device, recipe, scale, check or setting, or
        two claims of one id.
    MechiclError
        Where `out` cannot be written, before anything is trained.
    DamagedRunError
        For a kept run that is damaged, or of another recipe; its message says what to remove.
    """
    require_device(device)
    names = chosen([asked] if isinstance(asked, str) else list(asked))
    if not names:
        raise InputError("no claims were named; `all` takes every one")
    root = outside_runs(local_directory(out))
    claims = [load_claim(name) for name in names]
    ids = [claim.id for claim in claims]
    twice = sorted({each for each in ids if ids.count(each) > 1})
    if twice:
        raise InputError(
            f"several of the claims are called {', '.join(twice)}, and one record would replace "
            "the other; rename their files, or ask for them one by one with different --out"
        )
    needed = {claim.id: _recipes(claim, scale) for claim in claims}
    for claim in claims:
        checks.get(claim.check).resolve(claim.parameters)

    def records() -> Iterator[Record]:
        _make_room(root)
        for claim in claims:
            try:
                runs = {
                    label: trained(
                        recipe, run_directory(recipe, root), device, compile, watch, notify
                    )
                    for label, recipe in needed[claim.id].items()
                }
                record = _tested(claim, runs, root, figure=figure)
            except DamagedRunError as error:
                raise DamagedRunError(
                    f"claim {claim.id}: {error}. A run whose directory is removed is trained again"
                ) from error
            yield record

    return records()


def run_directory(recipe: Recipe, root: Path) -> Path:
    """Return where `reproduce` keeps the run of a recipe."""
    return root / "runs" / f"{recipe.name}-{recipe.digest}"


def _recipes(claim: Claim, scale: str | None) -> dict[str, Recipe]:
    return {
        label: load_recipe(needed.recipe, dict(needed.set), scale=scale)
        for label, needed in claim.runs.items()
    }


def _make_room(root: Path) -> None:
    for place in (root / "runs", root / "claims"):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MechiclError(
                f"cannot make the directory {place} ({error.strerror}); --out DIR, or out= in "
                "Python, puts runs and records elsewhere"
            ) from None
        if not os.access(place, os.W_OK):
            raise MechiclError(f"{place} is read-only; --out DIR puts runs and records elsewhere")


def _tested(claim: Claim, runs: Mapping[str, Run], root: Path, *, figure: bool) -> Record:
    started = time.monotonic()
    outcome = checks.get(claim.check)(runs, **claim.parameters)
    quantities = _quantities(claim, outcome.measurements)
    place = root / "claims" / claim.id
    record = Record(
        claim=claim,
        verdict=_overall([each.verdict for each in quantities if each.verdict is not None]),
        quantities=quantities,
        runs={label: Path(run.path) for label, run in runs.items()},
        seconds=time.monotonic() - started,
        figure=place.with_name(f"{claim.id}.png") if figure else None,
    )
    if record.figure is not None:
        drawn = plots.draw(outcome.shown if outcome.shown is not None else _table(record))
        write_aside(record.figure, lambda path: drawn.savefig(path, dpi=120, format="png"))
    text = json.dumps(record.document(), indent=1, ensure_ascii=False, allow_nan=False)
    write_aside(place.with_name(f"{claim.id}.json"), lambda path: path.write_text(text, "utf-8"))
    return record


def _quantities(claim: Claim, measurements: Sequence[Measurement]) -> tuple[Quantity, ...]:
    by_name: dict[str, list[Measurement]] = {name: [] for name in claim.published}
    for each in measurements:
        by_name.setdefault(each.quantity, []).append(each)
    absent = [name for name, found in by_name.items() if not found]
    if absent:
        known = sorted({each.quantity for each in measurements})
        raise InputError(
            f"claim {claim.id}: check {claim.check!r} measures {known}, not {absent}; the names "
            "under `published` are those that the check gives"
        )
    found = []
    for name, values in by_name.items():
        counted = [each for each in values if not each.excluded]
        stated = name in claim.published
        met = [claim.met(name, each.value) for each in counted] if stated else []
        found.append(
            Quantity(
                name=name,
                published=claim.published.get(name),
                tolerance=claim.tolerance_of(name) if stated else None,
                measurements=tuple(values),
                n_counted=len(counted),
                n_met=sum(met),
                interval=wilson(sum(met), len(met)),
                verdict=verdict(met) if stated else None,
            )
        )
    return tuple(found)


def _overall(verdicts: Sequence[Verdict]) -> Verdict:
    if "not reproduced" in verdicts:
        return "not reproduced"
    return "partly" if "partly" in verdicts else "reproduced"


def _table(record: Record) -> xr.Dataset:
    """Return measured and published values as `mechicl.plots.quantities` draws them.

    Others are in the record: on the same axis they would only squeeze those that count.
    """
    stated = [each for each in record.quantities if each.published is not None]
    most = max(len(each.measurements) for each in stated)
    values = np.full((len(stated), most), np.nan)
    counted = np.zeros((len(stated), most))
    for row, each in enumerate(stated):
        values[row, : len(each.measurements)] = [one.value for one in each.measurements]
        counted[row, : len(each.measurements)] = [not one.excluded for one in each.measurements]
    return xr.Dataset(
        {
            "measured": (("quantity", "seed"), values),
            "counts": (("quantity", "seed"), counted),
            "published": (("quantity",), [each.published for each in stated]),
        },
        coords={"quantity": [each.name for each in stated]},
        attrs={"figure": "quantities", "title": record.claim.statement},
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
