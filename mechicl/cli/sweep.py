"""`mechicl sweep`."""

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from mechicl.cli.options import Compile, Device, Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mechicl.studies.sweep import Entry


def sweep(
    source: Annotated[str, typer.Argument(metavar="SWEEP.yaml", help="The sweep's file.")],
    out: Annotated[
        str | None, typer.Option(help="Directory of the runs.", show_default="runs/SWEEP")
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Say how the runs stand, and train none.")
    ] = False,
    device: Device = "auto",
    compile: Compile = True,
    json: Json = False,
) -> int:
    """Train a recipe at many settings; the same command again goes on where it was stopped."""
    from mechicl.cli import progress
    from mechicl.studies import sweep as sweeps
    from mechicl.training.devices import require_device

    require_device(device)
    planned = sweeps.load_sweep(source)
    root = sweeps.sweep_directory(planned, out)
    if status:
        entries = sweeps.sweep_index(planned, root)
    else:
        made = sweeps.sweep(
            planned,
            root,
            device=device,
            compile=compile,
            watch=progress.watch,
            notify=progress.say,
        )
        entries = []
        try:
            for entry in made:
                if entry.status != "complete":
                    progress.say(f"{entry.name}: {entry.status}: {entry.reason}")
                entries.append(entry)
        except (KeyboardInterrupt, SystemExit):
            progress.say(f"{root / sweeps.INDEX} says what is there; the same command goes on")
            raise
    if json:
        _print([entry.document() for entry in entries])
    else:
        _show(entries)
        pattern, out = shlex.quote(f"{root}/*"), shlex.quote(f"{root}.zarr")
        print(f"next: mechicl study {pattern} --probe PROBE --out {out}")
    return 0 if status else _exit_code(entries)


def _exit_code(entries: "Sequence[Entry]") -> int:
    n_complete = sum(entry.status == "complete" for entry in entries)
    if n_complete < len(entries):
        return 4 if n_complete else 1
    return 1 if any(entry.diverged for entry in entries) else 0


def _print(document: object) -> None:
    import json

    print(json.dumps(document, ensure_ascii=False, allow_nan=False))


def _show(entries: "Sequence[Entry]") -> None:
    from mechicl.cli.tables import show

    varied = list(dict.fromkeys(key for entry in entries for key in entry.settings))
    rows = [
        [
            entry.name,
            *(str(entry.settings.get(key, "")) for key in varied),
            f"{entry.n_saved} of {entry.n_planned}" if entry.n_planned else "",
            " ".join(map(str, entry.diverged)),
            entry.status + (f": {entry.reason}" if entry.reason else ""),
        ]
        for entry in entries
    ]
    count = Counter(entry.status for entry in entries)
    title = f"{len(entries)} runs: " + ", ".join(f"{n} {name}" for name, n in count.items())
    show(title, ["run", *varied, "checkpoints", "diverged seeds", "status"], rows)
