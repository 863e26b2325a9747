"""`mechicl export`."""

from typing import Annotated

import typer

from mechicl.cli.options import RunDir


def export(
    run_dir: RunDir,
    step: Annotated[int, typer.Option(help="Step of the checkpoint.")],
    seed: Annotated[int, typer.Option(help="Seed of the checkpoint.")],
    out: Annotated[
        str, typer.Option(metavar="FILE.safetensors", help="File to write the checkpoint to.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file that is there.")
    ] = False,
) -> None:
    """Write one checkpoint to a safetensors file, with its recipe in the file's metadata."""
    from mechicl.run import open_run

    written = open_run(run_dir).export(out, step=step, seed=seed, overwrite=overwrite)
    print(f"seed {seed} at step {step} is in {written}")
