"""What the sliders of a report move through: losses, curves, circuits and attention, thinned."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Int

from mechicl import analyses
from mechicl.analyses.evaluation import spread_steps
from mechicl.analyses.heads import WEIGHTS, kq_circuit, ov_circuit
from mechicl.checkpoints import load
from mechicl.plots.interactive import Explorer, HeatMap, explorer, limits
from mechicl.run import Run

MOST_SEEDS = 8
MOST_STEPS = 100
_MOST_ENTRIES = {"KQ": 100_000, "OV": 100_000, "V": 60_000, "attention": 200_000}
_MOST_ATTENTION_STEPS = 60  # each is a forward pass of every seed
_FEWEST_STEPS = 8
_MOST_PANELS = 16
_MOST_CURVES = 32
_LOSS_POINTS = 300
_PROMPTS = 6
_PROMPTS_IN_MEAN = 8


class Explored(NamedTuple):
    """The interactive part of a page.

    Attributes
    ----------
    plots
        As `mechicl.plots.interactive` makes them.
    maps
        The heat maps among them.
    captions
        What each plot shows, by its name.
    notes
        What was thinned or left out, and why.
    """

    plots: Explorer
    maps: dict[str, HeatMap]
    captions: dict[str, str]
    notes: list[str]


class _Maps:
    """Heat maps in the making: those that there are, their captions, and what is said of others."""

    def __init__(self, run: Run, seeds: list[int]) -> None:
        self.run, self.seeds = run, seeds
        self.found: dict[str, HeatMap] = {}
        self.captions: dict[str, str] = {}
        self.notes: list[str] = []

    def add(
        self,
        name: str,
        sizes: Mapping[str, int],
        make: Callable[[list[int]], xr.DataArray],
        *,
        caption: str,
        symmetric: bool = True,
        most_steps: int = MOST_STEPS,
    ) -> None:
        """Add one map if it fits; `make` gives (seed, step, layer, panel, row, column) of steps."""
        layers, panels, rows, columns = sizes.values()
        if panels > _MOST_PANELS:
            across = list(sizes)[1]
            self.notes.append(f"{name}: the first {_MOST_PANELS} of {panels} along {across}")
            panels = _MOST_PANELS
        entries = len(self.seeds) * layers * panels * rows * columns
        n = min(most_steps, _MOST_ENTRIES[name] // entries)
        if n < min(_FEWEST_STEPS, len(self.run.steps)):
            self.notes.append(
                f"{name} is left out: a checkpoint of {len(self.seeds)} seeds has {entries:,} "
                f"entries, and a page holds {_MOST_ENTRIES[name]:,}"
            )
            return
        steps = self.run.steps[spread(self.run.steps, n)].tolist()
        if len(steps) < len(self.run.steps):
            self.notes.append(f"{name}: {len(steps)} of {len(self.run.steps)} checkpoints")
        values = make(steps)
        values = values.isel({values.dims[3]: slice(panels)})
        self.found[name] = HeatMap(values, limits(values), symmetric)
        self.captions[name] = (
            f"{caption} Colours are on one scale over all steps, that of the chosen seed. Indices "
            "count from 0."
        )


def of_run(run: Run, results: Mapping[str, xr.Dataset], *, attention: bool) -> Explored:
    """Return the interactive part of a run's page.

    Parameters
    ----------
    results
        By probe: their headline variables are drawn over steps.
    attention
        Whether attention patterns are computed, with forward passes of hooked models.
    """
    seeds = run.seeds[:MOST_SEEDS].tolist()
    maps = _Maps(run, seeds)
    if len(seeds) < len(run.seeds):
        maps.notes.append(f"interactive plots: the first {len(seeds)} of {len(run.seeds)} seeds")
    _add_circuits(maps)
    if attention:
        _add_attention(maps)
    else:
        maps.notes.append("attention is left out, as asked: mechicl report RUN has it")
    loss, text = _loss(run, seeds)
    if not (np.isfinite(loss) & (loss > 0)).any():
        loss = None
        maps.notes.append("the training loss is not drawn: no value above 0 is logged")
    curves = _curves(results, seeds, maps.notes)
    steps = run.steps[spread(run.steps, MOST_STEPS)]
    if len(steps) < len(run.steps):
        maps.notes.append(f"slider and curves: {len(steps)} of {len(run.steps)} checkpoints")
    plots = explorer(steps, seeds, loss=loss, curves=curves, maps=maps.found)
    captions = {
        "loss": f"Training loss of every seed: {text}. Both axes are logarithmic; the dotted line "
        "is the chosen step.",
        "curves": "Headline variables of the probes over training. A gap is where a value is "
        "undefined; the dotted line is the chosen step.",
    }
    return Explored(plots, maps.found, captions | maps.captions, maps.notes)


def spread(steps: Int[np.ndarray, " step"], n: int) -> Int[np.ndarray, " chosen"]:
    """Return positions of at most `n` steps, half of them even in log step and half in the step.

    The first and the last are among them where `n` is 2 or more; a single one is the last.
    """
    if n >= len(steps):
        return np.arange(len(steps))
    if n < 4:
        return spread_steps(steps, n)[-n:]
    chosen = spread_steps(steps, n // 2)
    even = np.linspace(steps[0], steps[-1], n - n // 2)
    nearest = np.abs(steps[:, None].astype(float) - even).argmin(axis=0)
    return np.unique(np.append(chosen, nearest))


def _add_circuits(maps: _Maps) -> None:
    """Add KQ and OV, of models whose heads read the input itself; else say why there are none."""
    run, params = maps.run, maps.run.params
    if {"KQ", "OV"} <= set(params.data_vars):
        for name, text in (("KQ", "scores"), ("OV", "what is written")):
            variable = params[name]
            sizes = {str(dim): variable.sizes[dim] for dim in variable.dims[2:]}
            maps.add(
                name,
                sizes,
                lambda steps, name=name: _read(run, [name], steps, maps.seeds)[name],
                caption=f"{name} circuit of every head, a parameter of this model ({text}).",
            )
        return
    continuous = run.recipe.model.input_kind == "continuous"
    if continuous and set(WEIGHTS) <= set(params) and "score_scale" in run.trajectory:
        heads = {dim: params.sizes[dim] for dim in ("layer", "head")}
        width = params.sizes["d_model"]
        names = [*WEIGHTS, "score_scale"]
        for name, make, axes, text in (
            ("KQ", kq_circuit, ("d_key", "d_query"), "the score of key z for query z′ is zᵀ KQ z′"),
            ("OV", ov_circuit, ("d_out", "d_in"), "an attended token z adds OV z to the output"),
        ):
            maps.add(
                name,
                heads | dict.fromkeys(axes, width),
                lambda steps, make=make: make(_read(run, names, steps, maps.seeds)),
                caption=f"{name} circuit of every head: {text}.",
            )
        return
    if set(params.get("W_V", xr.DataArray()).dims) >= {"channel", "layer"}:
        _add_channels(maps)
    else:
        maps.notes.append(
            "KQ and OV are not shown: heads of this model do not read its input itself, and "
            "entries of the residual stream have no meaning of their own"
        )


def _add_channels(maps: _Maps) -> None:
    """Add the values of a pooling model, a row a measurement."""
    run = maps.run
    variable = run.params["W_V"]
    measurements = variable.sizes["layer"] * variable.sizes["channel"]

    def make(steps: list[int]) -> xr.DataArray:
        values = _read(run, ["W_V"], steps, maps.seeds)["W_V"]
        rows = values.transpose("seed", "step", "layer", "channel", "d_model")
        shape = (*rows.shape[:2], 1, 1, measurements, rows.shape[-1])
        return xr.DataArray(
            rows.values.reshape(shape),
            {"seed": rows["seed"], "step": rows["step"]},
            ("seed", "step", "layer", "channel", "measurement", "d_model"),
        )

    sizes = {"layer": 1, "channel": 1, "measurement": measurements}
    maps.add(
        "V",
        sizes | {"d_model": variable.sizes["d_model"]},
        make,
        caption="Values V of a pooling model over the entries of a token (x, y): what each "
        "measurement reads, those of a layer one below the other.",
    )
    maps.notes.append("KQ and OV are not shown: a pooling model has no heads; V is in their place")


def _add_attention(maps: _Maps) -> None:
    """Add attention patterns, or say why there are none."""
    run = maps.run
    points = {
        name: point.shape
        for name, point in run.hooks().items()
        if name.endswith("hook_pattern") and point.shape is not None
    }
    if not points:
        maps.notes.append(
            "attention is not shown: models of this run have no attention patterns, no hook point "
            "hook_pattern"
        )
        return
    names = list(points)
    shape = next(iter(points.values()))
    _, heads, queries, keys = shape
    if set(points.values()) != {shape}:
        maps.notes.append("attention: the first layer, for patterns of layers differ in shape")
        names = names[:1]
    layers = {"layer": len(names), "head": heads}
    if run.recipe.model.input_kind == "tokens":
        sizes, n_prompts = layers | {"query_pos": queries, "key_pos": keys}, _PROMPTS_IN_MEAN
        caption = f"Attention of every head, as a mean over {n_prompts} fixed prompts."
    else:
        sizes, n_prompts = layers | {"batch": _PROMPTS, "key_pos": keys}, _PROMPTS
        caption = (
            f"Attention of every head from the last position, the query, in {n_prompts} fixed "
            "prompts, a row each: examples of a prompt have no order, so that no mean over prompts "
            "says where a head looks."
        )
    prompts = run.task.sample(n_prompts, seed=0)
    maps.add(
        "attention",
        sizes,
        lambda steps: xr.concat(
            [_patterns(run, names, prompts, step, maps.seeds, list(sizes)) for step in steps],
            "step",
            join="exact",
        ).transpose("seed", "step", *sizes),
        caption=caption,
        symmetric=False,
        most_steps=_MOST_ATTENTION_STEPS,
    )


def _patterns(
    run: Run, names: list[str], prompts: xr.Dataset, step: int, seeds: list[int], kept: list[str]
) -> xr.DataArray:
    """Return patterns at one step, a mean over prompts or those of the last query."""
    cache = run.cache(names, prompts=prompts, steps=step, seeds=seeds)
    layers = xr.concat([cache[name] for name in names], "layer", join="exact")
    if "query_pos" in kept:
        return layers.mean("batch", skipna=False)
    return layers.isel(query_pos=-1)


def _read(run: Run, names: list[str], steps: list[int], seeds: list[int]) -> xr.Dataset:
    return load(run.select(steps, seeds)[names], where=run.path)


def _loss(run: Run, seeds: list[int]) -> tuple[xr.DataArray, str]:
    """Return the training loss of some seeds, thinned to means, and say how."""
    loss = load(run.select(None, seeds)[["loss"]], where=run.path)["loss"]
    steps = loss["log_step"].values
    if len(steps) <= _LOSS_POINTS:
        return loss, "every value that was logged"
    edges = np.unique(spread_steps(steps, _LOSS_POINTS))
    # Of each stretch of steps the mean; the first value and the last stand alone.
    starts = np.append(edges[:-1], len(steps) - 1)
    counts = np.diff(np.append(starts, len(steps)))
    sums = np.add.reduceat(loss.transpose("seed", "log_step").values.astype(float), starts, axis=1)
    middle = steps[starts + (counts - 1) // 2]
    thinned = xr.DataArray(
        sums / counts,
        {"seed": loss["seed"], "log_step": middle},
        ("seed", "log_step"),
        attrs=loss.attrs,
    )
    return thinned, f"means over {len(starts)} stretches of {len(steps):,} steps"


def _curves(
    results: Mapping[str, xr.Dataset], seeds: list[int], notes: list[str]
) -> dict[str, xr.DataArray]:
    """Return headline variables over (seed, step), by head one a head; forward probes come last."""
    found: dict[str, xr.DataArray] = {}
    for probe, result in sorted(results.items(), key=lambda pair: analyses.get(pair[0]).forward):
        for name in analyses.get(probe).headline:
            variable = result[name].sel(seed=seeds)
            variable = variable.isel(step=spread(variable["step"].values, MOST_STEPS))
            if variable.sizes["step"] < 2:
                continue
            extra = [dim for dim in variable.dims if dim not in ("seed", "step")]
            if not extra:
                found[f"{probe}: {name}"] = variable
            elif len(extra) == 1:
                for index in range(variable.sizes[extra[0]]):
                    one = variable.isel({extra[0]: index}, drop=True)
                    found[f"{probe}: {name}, {extra[0]} {index}"] = one
    if len(found) > _MOST_CURVES:
        notes.append(f"curves: the first {_MOST_CURVES} of {len(found)}")
    return dict(list(found.items())[:_MOST_CURVES])
