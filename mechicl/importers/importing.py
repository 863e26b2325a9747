"""Import: find the files, translate them, compare a forward pass, and write a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from mechicl.checkpoints import Checkpoint, TrajectoryWriter
from mechicl.checkpoints.claim import require_free, staged
from mechicl.checkpoints.layout import ORIGIN
from mechicl.errors import InputError, MechiclError
from mechicl.importers.check import (
    TOLERANCE,
    Asked,
    Check,
    Comparison,
    ForwardPass,
    Outputs,
    OutputsLike,
    chosen_steps,
    read_outputs,
    untested,
)
from mechicl.importers.files import read_state, read_step
from mechicl.importers.losses import Losses, read_losses
from mechicl.importers.mapping import MappingLike, load_mapping
from mechicl.importers.sources import Sources, find
from mechicl.importers.suspects import suspects
from mechicl.importers.translate import Translator
from mechicl.training import ImportedRecipe, Recipe
from mechicl.training.loop import plan_run, versions
from mechicl.training.preflight import check_disk

_FEW = 5
_DIGEST = 16


def _silent(text: str) -> None:
    del text


class _Checkpoint(NamedTuple):
    """Which of the files, and where it is."""

    seed: int
    step: int
    path: Path


class _Looked(NamedTuple):
    """What one look at every file has found.

    Attributes
    ----------
    digest
        Hash of all parameters.
    last_finite
        By seed that diverged: the last step at which its parameters are finite.
    dropped
        Names of theirs that are 0 and have no place.
    comparisons
        One for each checkpoint that was checked.
    """

    digest: str
    last_finite: dict[int, int]
    dropped: tuple[str, ...]
    comparisons: list[Comparison]


def import_checkpoints(
    checkpoints: str | Path | Mapping[int, str | Path],
    recipe: Recipe,
    run_dir: Path,
    *,
    mapping: MappingLike,
    outputs: OutputsLike | Sequence[OutputsLike] = (),
    check: Check | None = None,
    unchecked: bool = False,
    tolerance: float = TOLERANCE,
    losses: str | Path | None = None,
    key: str | None = None,
    step_pattern: str | None = None,
    step_field: str | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = _silent,
) -> None:
    """Make a run of checkpoints that others trained; `mechicl.import_run` says what of.

    Every file is read twice: first all are translated and the forward pass compared, and nothing is
    written; then they are written, one after another, and the run is put in its place whole.
    """
    files = _listed(outputs)
    _require_a_check(files, check, unchecked, tolerance)
    texts = {"key": key, "step_pattern": step_pattern, "step_field": step_field}
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise InputError(f"{name} is text; given {text!r}")
    model, task = recipe.model, recipe.task
    chosen = load_mapping(mapping, model, task)
    translator = Translator(chosen, model, task)
    require_free(run_dir, overwrite=overwrite, resumable=False)
    field = None if step_field is None else (lambda path: read_step(path, step_field))
    if step_field is not None and step_pattern is not None:
        raise InputError("the step is from names or from a field; give one of the two")
    sources = find(checkpoints, pattern=step_pattern, field=field)
    seeds = tuple(sources.files)
    logged = read_losses(losses, seeds, sources.steps[-1])
    forward = ForwardPass(model, task, tolerance)
    asked = None if check is None else Asked(check, task)
    read = [part for each in files for part in read_outputs(each)]
    given = [_placed(each, sources) for each in read]

    looked = _look(sources, key, translator, forward, given, asked)
    remarks = _remarks(sources, looked, logged, read)
    for text in remarks:
        notify(text)
    imported = ImportedRecipe(
        name=recipe.name,
        description=recipe.description,
        task=task,
        model=model,
        seeds=seeds,
        steps=sources.steps,
        weights=looked.digest,
    )
    config = {
        "recipe": imported.settings(),
        ORIGIN: {
            "files": {seed: [str(path) for path in paths] for seed, paths in sources.files.items()},
            "mapping": chosen.settings(),
            "key": key,
            "step": step_pattern or (f"field {step_field}" if step_field else "from names"),
            "losses": None if losses is None else str(losses),
            "check": _said(looked.comparisons, given, asked, tolerance),
            "remarks": remarks,
        },
        "versions": versions(),
    }
    plan = plan_run(imported)
    check_disk(plan, run_dir)
    try:
        with (
            staged(run_dir, overwrite=overwrite) as place,
            TrajectoryWriter.create(place, plan, config) as writer,
        ):
            for checkpoint in _checkpoints(sources, key, translator, looked, logged.values):
                writer.add(checkpoint)
    except MechiclError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        why = error.__cause__.strerror or error.__cause__
        raise MechiclError(f"cannot write {run_dir}: {why}; nothing was imported") from error


def _require_a_check(
    outputs: list[Any], check: Check | None, unchecked: bool, tolerance: float
) -> None:
    is_checked = check is not None or bool(outputs)
    if is_checked and unchecked:
        raise InputError("--unchecked goes without outputs or a module to check against")
    if not is_checked and not unchecked:
        raise InputError(
            "an import is checked by a forward pass, for shapes do not tell a transposed matrix: "
            "give --outputs FILE with inputs and their model's outputs (in Python outputs=, or "
            "check=, their module), or --unchecked, which the run will say"
        )
    if not isinstance(tolerance, Real) or not 0 < tolerance < 1:
        raise InputError(f"tolerance is between 0 and 1; given {tolerance!r}")


def _listed(outputs: object) -> list[Any]:
    if isinstance(outputs, (str, Path, Mapping)):
        return [outputs]
    if not isinstance(outputs, Iterable):
        raise InputError(f"outputs are a file, or several; given {outputs!r}")
    return list(outputs)


def _placed(given: Outputs, sources: Sources) -> Outputs:
    """Give outputs their seed and step, the last where they say none; refuse those not there."""
    seeds = list(sources.files)
    seed = seeds[0] if given.seed is None and len(seeds) == 1 else given.seed
    step = sources.steps[-1] if given.step is None else given.step
    if seed is None:
        raise InputError(f"{given.where} does not say its seed, and there are {seeds}")
    if seed not in seeds or step not in sources.steps:
        raise InputError(
            f"{given.where} is of seed {seed} at step {step}; seeds are {seeds}, steps "
            f"{_some(sources.steps)}"
        )
    return given._replace(seed=seed, step=step)


def _files(sources: Sources) -> Iterator[_Checkpoint]:
    for row, step in enumerate(sources.steps):
        for seed, paths in sources.files.items():
            yield _Checkpoint(seed, step, paths[row])


def _look(
    sources: Sources,
    key: str | None,
    translator: Translator,
    forward: ForwardPass,
    given: list[Outputs],
    asked: Asked | None,
) -> _Looked:
    """Translate every file, hash what comes of it, compare those that are to be checked."""
    digest = sha256()
    finite: dict[int, int] = {}
    gone: dict[int, _Checkpoint] = {}
    dropped: dict[str, None] = {}
    comparisons: list[Comparison] = []
    asked_at = chosen_steps(sources.steps)
    problems: dict[str, list[Path]] = {}  # files, by what is wrong with them
    for file in _files(sources):
        try:
            state = read_state(file.path, key)
            parameters, zeros = translator(state, file.path)
        except InputError as error:
            problems.setdefault(str(error).removeprefix(str(file.path)), []).append(file.path)
            if len(problems) == _FEW:
                break
            continue
        dropped |= dict.fromkeys(zeros)
        if not all(np.isfinite(values).all() for values in parameters.values()):
            gone.setdefault(file.seed, file)
        elif file.seed in gone:
            raise InputError(
                f"{gone[file.seed].path} has NaN or infinities, and {file.path}, of a later step, "
                "has none: a training that diverged does not come back; these are not its steps"
            )
        else:
            finite[file.seed] = file.step
        _hash(digest, file, parameters)
        theirs = [each for each in given if (each.seed, each.step) == (file.seed, file.step)]
        if theirs and file.seed in gone:
            raise InputError(
                f"{theirs[0].where} is of seed {file.seed} at step {file.step}, whose weights have "
                "NaN or infinities; give outputs of a step before"
            )
        if asked is not None and file.step in asked_at and file.seed not in gone:
            theirs.append(asked.outputs(state, seed=file.seed, step=file.step))
        for each in theirs:
            found = forward.compare(parameters, each, seed=file.seed, step=file.step)
            if found.error > forward.tolerance:
                raise _mismatch(found, each, suspects(translator.mapping, forward, state, each))
            comparisons.append(found)
    if problems:
        more = "; the rest was not looked at" if len(problems) == _FEW else ""
        raise InputError("; ".join(map(_of_files, problems.items())) + more)
    never = [file for seed, file in gone.items() if seed not in finite]
    if never:
        raise InputError(
            f"{never[0].path}, the first of its seed, has NaN or infinities: there is nothing to "
            "import of it"
        )
    last_finite = {seed: finite[seed] for seed in gone}
    return _Looked(digest.hexdigest()[:_DIGEST], last_finite, tuple(dropped), comparisons)


def _of_files(problem: tuple[str, list[Path]]) -> str:
    text, paths = problem
    more = f" (and so {len(paths) - 1} more of the files)" if len(paths) > 1 else ""
    return f"{paths[0]}{more}{text}"


def _hash(digest: Any, file: _Checkpoint, parameters: Mapping[str, np.ndarray]) -> None:
    digest.update(f"{file.seed} {file.step}".encode())
    for name, values in sorted(parameters.items()):
        digest.update(f" {name} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())


def _mismatch(found: Comparison, given: Outputs, hint: str) -> InputError:
    return InputError(
        f"{given.where}: seed {found.seed} at step {found.step} is not the same function: outputs "
        f"of {found.n_prompts} prompts differ by up to {found.error:.3g} of their standard "
        f"deviation; {hint}. (Where theirs was computed in half precision, --tolerance 0.01 allows "
        "for it.)"
    )


def _remarks(
    sources: Sources, looked: _Looked, losses: Losses, outputs: Sequence[Outputs]
) -> list[str]:
    """Return what was decided that the user may not expect."""
    last = sources.steps[-1]
    remarks = [
        f"{each.where} says no step, and was held against the last, {last}"
        for each in outputs
        if each.step is None
    ]
    if sources.left_out:
        names = [path.name for path in sources.left_out]
        remarks.append(f"left out, for the pattern does not match: {_some(names)}")
    if looked.dropped:
        remarks.append(f"dropped, all 0, for the model has none: {_some(looked.dropped)}")
    remarks += [
        f"seed {seed} has NaN or infinities after step {step}: it counts as diverged there, and "
        "its later checkpoints are NaN"
        for seed, step in looked.last_finite.items()
    ]
    if losses.n_late:
        remarks.append(
            f"{losses.n_late} losses of step {last} or later are left out: a run has "
            "those of steps before its last checkpoint"
        )
    names = untested(looked.comparisons)
    if names:
        remarks.append(
            f"the outputs that were compared do not depend on {', '.join(names)}, which are not "
            "checked; outputs at another step would tell"
        )
    return remarks


def _said(
    comparisons: list[Comparison], given: list[Outputs], asked: Asked | None, tolerance: float
) -> dict[str, Any] | None:
    """Return how it was checked, as `config.yaml` says it; None if it was not."""
    if not comparisons:
        return None
    by = dict.fromkeys([*(each.where for each in given), *([asked.name] if asked else [])])
    return {
        "by": list(by),
        "tolerance": tolerance,
        "checkpoints": [
            {
                "seed": each.seed,
                "step": each.step,
                "prompts": each.n_prompts,
                "error": float(f"{each.error:.3g}"),
            }
            for each in comparisons
        ],
        "untested": untested(comparisons),
    }


def _checkpoints(
    sources: Sources,
    key: str | None,
    translator: Translator,
    looked: _Looked,
    losses: Float32[np.ndarray, "seed log_step"],
) -> Iterator[Checkpoint]:
    """Yield what is stored at each step, a file of every seed in memory at a time.

    Raises MechiclError after the last where files are not what they were at the first look.
    """
    digest = sha256()
    diverged = np.array([looked.last_finite.get(seed, np.nan) for seed in sources.files])
    before = 0
    for row, step in enumerate(sources.steps):
        stacked: dict[str, list[np.ndarray]] = {}
        for seed, paths in sources.files.items():
            parameters = translator(read_state(paths[row], key), paths[row]).parameters
            _hash(digest, _Checkpoint(seed, step, paths[row]), parameters)
            for name, values in parameters.items():
                gone = step > looked.last_finite.get(seed, step)
                stacked.setdefault(name, []).append(
                    np.full_like(values, np.nan) if gone else values
                )
        yield Checkpoint(
            parameters={name: np.stack(values) for name, values in stacked.items()},
            loss=losses[:, before:step],
            diverged_at=np.where(diverged < step, diverged, np.nan),
        )
        before = step
    if digest.hexdigest()[:_DIGEST] != looked.digest:
        raise MechiclError(
            "files of weights changed while they were imported, and what was checked is not what "
            "they hold; nothing was imported. Import them when nobody writes them"
        )


def _some(values: Sequence[object]) -> str:
    more = f" and {len(values) - _FEW} more" if len(values) > _FEW else ""
    return ", ".join(map(str, values[:_FEW])) + more
