"""Whether a run fits on the machine, asked before anything is created."""

import os
from pathlib import Path

from mechicl.checkpoints import Plan
from mechicl.errors import InputError
from mechicl.training.batches import block_steps
from mechicl.training.recipe import Recipe

_FLOAT = 4
_BLOCKS = 3  # one in use, the others drawn or being drawn
_DISK_BLOCK = 4096  # what is lost at the end of a file, and what a folder takes, at most
_BESIDE = 8  # the run directory, config, lock, and resume files, old and new, one being written
_PROMPT_COPIES = 4  # the embedded prompts, and what forward and gradient keep of them


def check_disk(plan: Plan, run_dir: Path) -> None:
    """Raise InputError if the run needs more disk or files than there is."""
    place = os.statvfs(_existing(run_dir))
    entries = plan.n_files + plan.n_folders + _BESIDE
    needed, free = plan.nbytes + _DISK_BLOCK * entries, place.f_frsize * place.f_bavail
    if needed > free:
        raise InputError(
            f"the run would take {_size(needed)} in {run_dir}, where {_size(free)} are free; "
            "store fewer checkpoints (checkpoints.every) or seeds, or give another directory"
        )
    if place.f_files and entries > place.f_favail:  # some file systems do not count them
        raise InputError(
            f"the run would make {entries} files and folders in {run_dir}, where "
            f"{place.f_favail} are left; store fewer checkpoints, or give another directory"
        )


def check_room(recipe: Recipe, plan: Plan, run_dir: Path) -> None:
    """Raise InputError if the run needs more disk, files or memory than there is.

    Memory is estimated from below: blocks of normals for every seed, and a few copies of one batch.
    """
    check_disk(plan, run_dir)
    numbers = recipe.task.n_normals + recipe.model.n_dropout(recipe.task)
    step = recipe.prompts_a_step * numbers * (_BLOCKS * block_steps(recipe) + _PROMPT_COPIES)
    kept = (recipe.training_set or 0) * recipe.task.n_normals
    needed = _FLOAT * len(recipe.seeds) * (step + kept)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        fixed = "" if not kept else f" and a training_set of {recipe.training_set:,}"
        smaller = "training_set" if kept > step else "batch_size"
        raise InputError(
            f"training {len(recipe.seeds)} seeds with {recipe.prompts_a_step} prompts of "
            f"{numbers:,} numbers each{fixed} takes at least {_size(needed)} of memory, and "
            f"there are {_size(memory)}; take fewer seeds at once, or a smaller {smaller}"
        )


def _existing(path: Path) -> Path:
    """Return the nearest directory above `path`, or itself, that is there."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _size(nbytes: int) -> str:
    power = min(len(str(nbytes)) // 3, 4)
    return f"{nbytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
