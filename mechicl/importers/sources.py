"""Which file is the checkpoint of which seed and step."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mechicl.errors import InputError
from mechicl.paths import expanded, path_text
from mechicl.training import MOST_STEPS

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""What files of weights are called; others are left alone."""

_WHOLE = ("model.safetensors", "pytorch_model.bin")
"""The weights in a folder of one checkpoint, as transformers names them."""
_NOT_WEIGHTS = re.compile(r"(optimizer|scheduler|scaler|rng_state|training_args)[\w.-]*")
_SHARD = re.compile(r".*-\d+-of-\d+\.\w+")
_SEED = re.compile(r"seed[-_=. ]*(\d+)", re.IGNORECASE)
_STEP_WORDS = ("step", "steps", "globalstep")
_OTHER_WORDS = ("checkpoint", "ckpt", "iter", "iteration", "iterations", "update", "updates", "it")
_EPOCH_WORDS = ("epoch", "epochs", "ep")
_FEW = 5


class Sources(NamedTuple):
    """The files of a run that is to be imported.

    Attributes
    ----------
    steps
        Increasing, the same for every seed.
    files
        By seed, a file a step.
    left_out
        Files that the pattern does not match, which the user gave.
    """

    steps: tuple[int, ...]
    files: dict[int, list[Path]]
    left_out: tuple[Path, ...]


def find(
    checkpoints: object,
    *,
    pattern: str | None = None,
    field: Callable[[Path], Any] | None = None,
) -> Sources:
    """Find the checkpoints in a folder, or in one folder a seed.

    Parameters
    ----------
    checkpoints
        A folder with a file a step, or a folder a step with `model.safetensors` or
        `pytorch_model.bin` in it; one with a folder a seed, `seed0`, `seed1`; or folders by seed.
    pattern
        Regular expression that finds the step in the name, as its one group; other files are left
        out. None: the number after `step`, `checkpoint`, `iter` and the like, or the only one.
    field
        Gives the step of a file instead.

    Raises
    ------
    InputError
        For what is no folder, or holds no checkpoint; for steps that are no integers, cannot be
        told, or are there twice; and for seeds that lack steps of others, naming them.
    """
    matcher = _compiled(pattern)
    found, left_out = {}, []
    try:
        for seed, folder in _folders(checkpoints).items():
            found[seed], others = _steps(folder, matcher, field)
            left_out += others
    except OSError as error:  # a folder that may not be read, a name too long for any
        raise InputError(f"{error.filename} cannot be read: {error.strerror or error}") from None
    steps = sorted({step for files in found.values() for step in files})
    lacking = {seed: [step for step in steps if step not in files] for seed, files in found.items()}
    if any(lacking.values()):
        said = "; ".join(
            f"seed {seed} has no step {_listed(missing)}"
            for seed, missing in lacking.items()
            if missing
        )
        raise InputError(
            f"all seeds of a run have the same steps: {said}. Import seeds with other steps as "
            "runs of their own, or take the steps out that not all have"
        )
    files = {seed: [of_seed[step] for step in steps] for seed, of_seed in found.items()}
    return Sources(tuple(steps), files, tuple(left_out))


def _folders(checkpoints: object) -> dict[int, Path]:
    """Return the folder of each seed."""
    if isinstance(checkpoints, Mapping):
        if not checkpoints:
            raise InputError("no folders of checkpoints were given")
        wrong = [seed for seed in checkpoints if type(seed) is not int or not 0 <= seed < 2**63]
        if wrong:
            raise InputError(f"seeds are integers from 0; given {wrong}")
        folders = {seed: _folder(folder) for seed, folder in checkpoints.items()}
        places: dict[Path, int] = {}
        for seed, folder in folders.items():
            other = places.setdefault(folder.resolve(), seed)
            if other != seed:
                raise InputError(
                    f"seeds {other} and {seed} are both from {folder}; a seed has a folder of its "
                    "own"
                )
        return folders
    folder = _folder(checkpoints)
    seeds: dict[int, Path] = {}
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    for path in inside:
        match = _SEED.fullmatch(path.name)
        if match is None:
            continue
        if int(match[1]) in seeds:
            raise InputError(f"{seeds[int(match[1])]} and {path} are of one seed")
        seeds[int(match[1])] = path
    if not seeds:
        return {0: folder}
    loose = [path for path in _candidates(folder) if path not in seeds.values()]
    if loose:
        raise InputError(
            f"{folder} has folders of seeds ({', '.join(p.name for p in seeds.values())}) and "
            f"checkpoints beside them ({_names(loose)}); give the folders, as --seed N=DIR"
        )
    return dict(sorted(seeds.items()))


def _folder(path: object) -> Path:
    folder = expanded(path_text(path))
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise InputError(
            f"{folder} {what}; give a folder with a file a step, such as step-000500.pt"
        )
    return folder


def _candidates(folder: Path) -> list[Path]:
    """Return files of weights, and folders that hold one, in the order of their names."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__")):
            continue
        if path.is_dir():
            if _inside(path):
                found.append(path)
        elif path.suffix.lower() in ENDINGS and not _NOT_WEIGHTS.fullmatch(path.stem):
            found.append(path)
    return found


def _inside(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix.lower() in ENDINGS
        and not path.name.startswith(".")
        and not _NOT_WEIGHTS.fullmatch(path.stem)
    ]


def _weights(path: Path) -> Path:
    """Return the file of weights of a checkpoint that may be a folder."""
    if not path.is_dir():  # a file, or a link to nothing, which reading it will say
        return path
    inside = _inside(path)
    for name in _WHOLE:
        if path / name in inside:
            return path / name
    shards = [each for each in inside if _SHARD.fullmatch(each.name)]
    if shards:
        raise InputError(
            f"{path} holds its weights in parts ({_names(shards)}); save them as one file first, "
            "as save_pretrained(..., max_shard_size=...) does"
        )
    if len(inside) > 1:
        raise InputError(f"{path} holds several files of weights ({_names(inside)}); keep one")
    return inside[0]


def _steps(
    folder: Path, matcher: re.Pattern[str] | None, field: Callable[[Path], Any] | None
) -> tuple[dict[int, Path], list[Path]]:
    """Return the files of a folder by step, and those that the user's pattern leaves out."""
    candidates = _candidates(folder)
    if not candidates:
        raise InputError(
            f"{folder} has no checkpoints: no file, and no folder with a file, that ends in "
            f"{', '.join(ENDINGS)}"
        )
    found: dict[int, list[Path]] = {}
    problems, left_out = [], []
    for path in candidates:
        weights = _weights(path)
        if field is not None:
            step = _integer(field(weights))
            if step is None:
                problems.append(f"the step in {path.name} is {field(weights)!r}, not an integer")
        elif matcher is not None:
            match = matcher.search(path.name)
            if match is None:
                left_out.append(path)
                continue
            text = match["step"] if "step" in matcher.groupindex else match[1]
            step = int(text) if text and re.fullmatch(r"\d+", text) else None
            if step is None:
                problems.append(f"the step in {path.name} is {text!r}, not an integer")
        else:
            step, problem = _step_of(path)
            problems += [problem] if problem else []
        if step is not None:
            found.setdefault(step, []).append(weights)
    problems += [
        f"step {step} is there {len(paths)} times: {_names(paths)}"
        for step, paths in sorted(found.items())
        if len(paths) > 1
    ]
    late = [step for step in found if not 0 <= step <= MOST_STEPS]
    if late:
        problems.append(f"steps are updates, from 0 to {MOST_STEPS:,}; given {_listed(late)}")
    if problems:
        more = f"; and {len(problems) - _FEW} more" if len(problems) > _FEW else ""
        raise InputError(
            f"{folder}: {'; '.join(problems[:_FEW])}{more}. --step-pattern REGEX finds the step in "
            "names (files that it does not match are left out), --step-field NAME in files"
        )
    if not found:
        raise InputError(
            f"no name in {folder} matches {getattr(matcher, 'pattern', '')!r}; there are "
            f"{_names(candidates)}"
        )
    return {step: paths[0] for step, paths in found.items()}, left_out


def _step_of(path: Path) -> tuple[int | None, str]:
    """Return the step that a name says, or why it cannot be told."""
    stem = path.name if path.is_dir() else path.name[: -len(path.suffix)]
    tokens = [token for token in re.split(r"[-_.=\s]+", stem.lower()) if token]
    pairs: list[tuple[str, int]] = []
    strange = []
    for position, token in enumerate(tokens):
        match = re.fullmatch(r"([a-z]*)(\d+)", token)
        if match:
            before = tokens[position - 1] if position and not match[1] else match[1]
            pairs.append((before, int(match[2])))
        elif any(character.isdigit() for character in token):
            strange.append(token)
    for words in (_STEP_WORDS, _OTHER_WORDS):
        named = [number for word, number in pairs if word in words]
        if len(named) == 1 and not strange and not _decimal(stem):
            return named[0], ""
    if len(pairs) == 1 and not strange:
        word, number = pairs[0]
        if word in _EPOCH_WORDS:
            return None, f"{path.name} counts epochs, not steps"
        return number, ""
    numbers = [str(number) for _, number in pairs] + strange
    if not numbers:
        return None, f"{path.name} has no step in its name"
    return None, f"the step in {path.name} cannot be told: it has {', '.join(numbers)}"


def _decimal(stem: str) -> bool:
    return re.search(r"\d\.\d", stem) is not None


def _integer(given: Any) -> int | None:
    return given if type(given) is int else None


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InputError(f"step pattern {pattern!r} is no regular expression: {error}") from None
    if "step" not in compiled.groupindex and compiled.groups != 1:
        raise InputError(
            rf"step pattern {pattern!r} has {compiled.groups} groups; give one, around the step, "
            r"as in 'epoch-(\d+)', or call it step: (?P<step>\d+)"
        )
    return compiled


def _names(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _FEW} more" if len(paths) > _FEW else ""
    return ", ".join(path.name for path in paths[:_FEW]) + more


def _listed(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - _FEW} more" if len(steps) > _FEW else ""
    return ", ".join(map(str, steps[:_FEW])) + more
