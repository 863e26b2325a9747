"""`mechicl hooks`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mechicl.cli.options import Json, RunDir

if TYPE_CHECKING:
    from mechicl.models.activations import HookShape


def hooks(
    run_dir: RunDir,
    json: Json = False,
) -> None:
    """List the hook points of a run's models: names, dims and shapes on one prompt."""
    from mechicl.run import open_run

    run = open_run(run_dir)
    found = run.hooks()
    if json:
        _print_json(run_dir, run.trajectory.attrs["run_digest"], found)
    else:
        _print_table(found)


def _print_json(run_dir: str, digest: str, found: Mapping[str, "HookShape"]) -> None:
    import json

    points = [{"name": name, **point._asdict()} for name, point in found.items()]
    print(json.dumps({"run": run_dir, "run_digest": digest, "hooks": points}))


def _print_table(found: Mapping[str, "HookShape"]) -> None:
    from mechicl.cli.tables import show

    rows = [
        [
            name,
            "never fires" if point.shape is None else ", ".join(map(str, point.shape)),
            "no names" if point.dims is None else ", ".join(point.dims),
        ]
        for name, point in found.items()
    ]
    show("hook points on one prompt", ["name", "shape", "dims"], rows)
