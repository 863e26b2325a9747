"""What the scripts share: their command line, trained runs, and where a figure goes.

A script has a function `draw(runs)` that returns a matplotlib Figure, and ends with `main`:

    python docs/gallery/he2025_fig04.py --seeds 4      # trains what is not there, writes the PNG
    python docs/gallery/he2025_fig04.py --quick        # tried in seconds; the figure means nothing
"""

import argparse
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from PIL import Image

from mechicl.cli.progress import say, watch
from mechicl.errors import MechiclError
from mechicl.plots import style
from mechicl.results import directory, write_aside
from mechicl.studies.reproduce import run_directory
from mechicl.studies.trained import trained
from mechicl.training import load_recipe

if TYPE_CHECKING:
    from mechicl.run import Run

T = TypeVar("T")

_WIDEST = 1300
"""Of a figure, in pixels: what a page shows without shrinking it much."""
_TRIED = {"n_steps": 40, "batch_size": 16, "checkpoints": {"every": 20}}
"""Settings under --quick."""


@dataclass(frozen=True)
class Runs:
    """Where a script takes its trained runs from.

    Attributes
    ----------
    root
        Directory that `mechicl reproduce --out` is given: runs are shared with it.
    seeds
        Train the first so many seeds of a recipe; None takes all.
    scale
        Size of the recipes, such as `paper`; None takes the recipes' own.
    quick
        Whether the script is only tried.
    """

    root: Path
    seeds: int | None = None
    scale: str | None = None
    quick: bool = False

    def trained(self, name: str, **settings: Any) -> "Run":
        """Return the run of a recipe under some settings, trained now if it is not there yet."""
        tried = _TRIED if self.quick else {}
        recipe = load_recipe(name, settings | tried, scale=self.scale)
        if self.seeds is not None and (self.quick or "seeds" not in settings):
            recipe = load_recipe(recipe, {"seeds": recipe.seeds[: self.seeds]})
        place = run_directory(recipe, self.root)
        return trained(recipe, place, "auto", not self.quick, watch, say)

    def size(self, whole: T, tried: T) -> T:
        """Return a size, such as a number of prompts: `tried` under --quick."""
        return tried if self.quick else whole


def main(draw: Callable[[Runs], Figure]) -> None:
    """Parse the command line, draw a script's figure, and write it beside the script."""
    script, about = Path(inspect.getfile(draw)), str(draw.__globals__["__doc__"])
    parser = argparse.ArgumentParser(prog=script.name, description=about.partition("\n")[0])
    parser.add_argument("--runs", type=Path, help="trained runs (default: runs/reproduce)")
    parser.add_argument("--out", type=Path, help="place of the PNG (default: beside the script)")
    parser.add_argument("--seeds", type=int, help="the first so many of each recipe (default: all)")
    parser.add_argument("--scale", help="size of the recipes, such as paper")
    parser.add_argument("--quick", action="store_true", help="try the script in seconds")
    given = parser.parse_args()
    if given.seeds is not None and given.seeds < 1:
        parser.error(f"--seeds is a number from 1; given {given.seeds}")
    # What is tried must not end up beside what is shown.
    rest = Path("runs/quick") if given.quick else None
    seeds = min(given.seeds or 2, 2) if given.quick else given.seeds
    try:
        root = directory(given.runs or rest or Path("runs/reproduce"))
        out = directory(given.out or rest or script.parent)
        runs = Runs(root, seeds, given.scale, given.quick)
        save(draw(runs), out / f"{script.stem}.png", runs)
    except MechiclError as error:
        say(f"{script.name}: {error}")
        sys.exit(error.exit_code)


def save(figure: Figure, target: Path, runs: Runs) -> None:
    """Write a figure as a PNG of 256 colours, at most `_WIDEST` pixels wide."""
    if runs.quick:
        said = figure.get_suptitle()
        style.title(figure, "tried with --quick: this figure means nothing", said)
    file = BytesIO()
    figure.savefig(file, dpi=min(110, _WIDEST / figure.get_figwidth()))
    image = Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    write_aside(target, lambda path: image.save(path, format="png", optimize=True))
    say(f"wrote {target}")


def settled(run: "Run", *probes: str) -> list[int]:
    """Return the seeds on which the statements of all `probes` hold at the end of training."""
    holds = [run.analyze(probe)["holds"].isel(step=-1) for probe in probes]
    good = xr.concat(holds, "probe", join="exact", coords="minimal", compat="override") == 1
    return [int(seed) for seed in run.seeds[good.all("probe").values]]


def circuit_maps(panels: np.ndarray, circuits: xr.Dataset, limits: tuple[float, float]) -> None:
    """Draw KQ of every head, and beside it the last row of OV as a column.

    Parameters
    ----------
    panels
        Two axes a head.
    circuits
        Result of the probe `circuits` at one seed, step and layer.
    limits
        Largest size of an entry of KQ and of OV, where their colours end.
    """
    for head in range(circuits.sizes["head"]):
        one = circuits.isel(head=head)
        kq, ov = panels[2 * head : 2 * head + 2]
        style.heatmap(kq, one["KQ"].transpose("d_key", "d_query").values, limits[0])
        style.heatmap(ov, one["OV"].isel(d_out=[-1]).transpose("d_in", "d_out").values, limits[1])
        kq.set_title(f"KQ {head}\nω = {float(one['omega']):.3g}", fontsize=8)
        ov.set_title(f"OV {head}\nμ = {float(one['mu']):.3g}", fontsize=8)
        ov.set_xticks([])


def circuit_limits(*circuits: xr.Dataset) -> tuple[float, float]:
    """Return the largest size of an entry of KQ, and of OV's last row, over several results."""
    rows = [(each["KQ"], each["OV"].isel(d_out=-1)) for each in circuits]
    kq, ov = (float(max(abs(each[i]).max() for each in rows)) for i in (0, 1))
    return kq, ov
