"""What the predictions do when an activation is replaced: by a donor's, by 0, by its mean."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float, Shaped

from mechicl.analyses.evaluation import JointMoments, spread_steps
from mechicl.analyses.heads import NONFINITE, nonfinite
from mechicl.analyses.probe import Forward, probe, undefined_codes
from mechicl.errors import InputError, unknown
from mechicl.schema import Var

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import HookedTransformer

    from mechicl.models.interventions import Patch

Source = Literal["prompt", "checkpoint", "seed", "zero", "mean"]
Per = Literal["all", "head", "position", "head_position"]
Weights = dict[str, Float[np.ndarray, "..."]]

_MODEL = ("seed", "step")
_PART = (*_MODEL, "head", "pos")
_MEASURES = {
    "recovered": "part of the way to the donor's predictions",
    "moved": "mean square change of predictions",
    "loss_change": "loss patched less loss, in the task's unit",
}
_GIVEN = [each for name in _MEASURES for each in (name, f"{name}_error")]
_PREFERRED = ("attn.hook_z", "hook_workspace", "attn.hook_phi", "hook_resid_post")
_OUTPUTS_AT_ONCE = 2**16  # sequences whose outputs are held


def _declared(prefix: str, dims: tuple[str, ...], which: str) -> dict[str, Var]:
    declared = {}
    for name, text in _MEASURES.items():
        least = 0 if name == "moved" else None
        declared[prefix + name] = Var(dims, "1", f"{text}, {which}", least)
        declared[f"{prefix}{name}_error"] = Var(dims, "1", f"standard error of {prefix}{name}", 0)
    return declared


@probe(
    needs={},
    gives={
        "hook": Var((), "1", "hook point that is patched"),
        **_declared("", _PART, "a part patched"),
        **_declared("whole_", _MODEL, "all of it patched"),
    },
    undefined=(
        NONFINITE,
        "nonfinite_donor",
        "no_donor",
        "nonfinite_predictions",
        "donor_equals_base",
    ),
    headline=("whole_recovered", "whole_moved", "whole_loss_change"),
    references=("Heimersheim and Nanda 2024 (arXiv 2404.15255)", "Zhang and Nanda 2023"),
    forward=True,
)
def activation_patching(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    hook: str | None = None,
    source: Source = "prompt",
    per: Per | None = None,
    from_step: Annotated[int, pydantic.Field(ge=0)] | None = None,
    from_seed: Annotated[int, pydantic.Field(ge=0)] | None = None,
    n_prompts: Annotated[int, pydantic.Field(ge=4, multiple_of=2)] = 512,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 10,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Measure how predictions move when what passes a hook point is replaced.

    ŷ are the predictions, ŷ′ those with the patch in, ŷ° the donor's own; sums are over a fixed set
    of prompts and the entries of a prediction. Of tokens, ŷ are logits less their mean over tokens:
    a constant added to all of them changes no probability.

    - `recovered` = Σ (ŷ′ − ŷ)(ŷ° − ŷ) / Σ (ŷ° − ŷ)²: 0 where nothing moves, 1 where predictions
      follow the donor; it may be below 0 and above 1.
    - `moved` = mean of (ŷ′ − ŷ)², from 0.
    - `loss_change` = mean loss with the patch less that without it, on the prompts' own targets, in
      the unit of the task's loss.

    Each is (seed, step, head, pos), a part of the hook point patched alone; `per` says which axes
    it has, the others are of size 1. `pos` is a position of the sequences that the model reads,
    `pos`, `query_pos` or `query` of the hook point: in a window where the model has a `context`.
    The same with all of the hook point patched are `whole_recovered`, `whole_moved` and
    `whole_loss_change` (seed, step). `hook` says which one it was, as `mechicl.schema.flag_names`
    reads it.

    `recovered_error`, `moved_error`, `loss_change_error`, `whole_recovered_error`,
    `whole_moved_error` and `whole_loss_change_error` are standard errors over prompts, that of a
    ratio by the delta method. Prompts of a pair are each other's donors: pairs are independent.

    Models run in float64, one patch a pass: a donor that does not differ moves exactly nothing.

    When it misleads: parts do not add up, but where the rest of the model is linear; what one part
    carries another may carry too, so that nothing moves though each matters. Zero, and even the
    mean, are activations that the model never sees: a large `loss_change` may say that alone. From
    another seed or checkpoint, an activation comes in a basis of its own, inside a head above all:
    a low `recovered` is no sign of another function. In a position that later ones do not read,
    nothing is found. All steps share the prompts.

    Undefined: weights that are not finite, of the model or of the donor; predictions that are not
    finite, patched or not; `recovered` without a donor (`zero`, `mean`), and of a donor that
    predicts exactly as the model does.

    Parameters
    ----------
    hook
        Hook point. None takes, of the last block, the first that there is of `attn.hook_z`,
        `hook_workspace`, `attn.hook_phi` and `hook_resid_post`.
    source
        What is put in: the activation of the same model on another `prompt`, that of another
        `checkpoint` of the seed or of another `seed` at the step on the same prompt; `zero`; or the
        `mean` over all sequences.
    per
        What is patched by itself: every `head`, every `position`, each pair of both
        (`head_position`), or `all` at once. None takes heads where the hook point has them.
    from_step
        Step of the donor, for `checkpoint`; None takes the last one that is analysed.
    from_seed
        Seed of the donor, for `seed`; None takes the next one that is analysed, of the last the
        first.
    n_prompts
        Size of the evaluation set, even.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first), first
        and last in; 1 takes the last.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    Heimersheim and Nanda, How to use and interpret activation patching, 2024 (arXiv 2404.15255);
    Zhang and Nanda, Towards best practices of activation patching, 2023 (arXiv 2309.16042).

    Raises
    ------
    InputError
        For a hook point that the model has not, or that does not fire, naming those that it has;
        for a `per` that it has no axis for; for a `from_step` or `from_seed` that the run has not,
        or that the source does not take; for a single seed without `from_seed`.
    """
    from mechicl.models.evaluate import one_thread_an_operation

    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    donors = _donors(chosen, forward, source, from_step, from_seed)
    inputs, targets = forward.prompts(n_prompts, evaluation_seed)
    bench = _Bench(forward, inputs, targets, source)
    with one_thread_an_operation():
        return _over(chosen, donors, bench, hook, per)


def _over(
    chosen: xr.Dataset,
    donors: xr.Dataset | None,
    bench: "_Bench",
    hook: str | None,
    per: Per | None,
) -> xr.Dataset:
    """Patch every model that is finite, and gather what was measured."""
    broken = nonfinite(chosen).transpose(*_MODEL)
    spoilt = xr.zeros_like(broken) if donors is None else broken.copy(data=_broken(donors))
    sound = np.argwhere(~(broken | spoilt).values)
    # Which hook points there are is asked of the first model: of zeros if there is none.
    first = _weights(chosen, *(sound[0] if len(sound) else (0, 0)))
    hook, places = bench.places(first, hook, per)
    n_heads, n_positions = (max(size, 1) for size in places)
    grid = (chosen.sizes["seed"], chosen.sizes["step"])
    found = {name: np.full((*grid, 1 + n_heads * n_positions), np.nan) for name in _GIVEN}
    same = np.zeros(grid, bool)
    for seed, step in sound:
        donor = None if donors is None else _weights(donors, seed, step)
        measured = bench.measure(_weights(chosen, seed, step), donor, hook, places)
        same[seed, step] = measured.pop("same")
        for name, values in measured.items():
            found[name][seed, step] = values
    data = {}
    for name, values in found.items():
        parts = values[..., 1:].reshape(*grid, n_heads, n_positions)
        data |= {name: (_PART, parts), f"whole_{name}": (_MODEL, values[..., 0])}
    result = xr.Dataset(data, coords={dim: chosen[dim] for dim in _MODEL})
    declared = Var((), "1", "hook point that is patched", flags={0: hook})
    result = result.assign_coords(hook=((), 0, declared.attrs))
    no_donor = xr.full_like(broken, bench.source in ("zero", "mean"))
    moved = result["moved"].isnull().any(("head", "pos")) | result["whole_moved"].isnull()
    reasons = (broken, spoilt, no_donor, moved, broken.copy(data=same))
    names = (NONFINITE, "nonfinite_donor", "no_donor", "nonfinite_predictions", "donor_equals_base")
    return result.assign(undefined=undefined_codes(dict(zip(names, reasons, strict=True))))


class _Bench:
    """The prompts, and what is done to one model after another on them."""

    def __init__(
        self,
        forward: Forward,
        inputs: Shaped[np.ndarray, "batch *input"],
        targets: Shaped[np.ndarray, "batch *target"],
        source: Source,
    ) -> None:
        if not (forward.hooked and forward.reads and forward.answers and forward.loss):
            raise InputError("probe 'activation_patching' needs a Forward with hooked models")
        self._hooked, self._answers, self._loss = forward.hooked, forward.answers, forward.loss
        self.source, self._targets = source, targets
        self._logits = np.issubdtype(inputs.dtype, np.integer)
        swapped = np.arange(len(inputs)) ^ 1  # 1, 0, 3, 2, ...: pairs, and no prompt is its own
        self._reads: Tensor = forward.reads(inputs, np.float64)
        self._others: Tensor = forward.reads(inputs[swapped], np.float64)

    def places(
        self, weights: Weights, hook: str | None, per: Per | None
    ) -> tuple[str, tuple[int, int]]:
        """Return which hook point is patched, and how many heads and positions, 0 for all at once.

        Raises InputError for a hook point that the model has not, and for parts that it has not.
        """
        from mechicl.models.hooked import hook_dims
        from mechicl.models.interventions import record

        finite = {name: np.nan_to_num(value, posinf=0, neginf=0) for name, value in weights.items()}
        model = self._hooked(finite)
        chosen = _default(model) if hook is None else hook
        if chosen not in model.hook_dict:
            raise unknown("hook point", chosen, model.hook_dict)
        shape = record(model, self._reads[:1], [chosen])[chosen].shape
        try:
            dims = hook_dims(chosen)
        except InputError:  # of no known dims: it is patched as a whole
            dims = ()
        position = _position(dims)
        per = per or ("head" if "head" in dims else "all")
        if ("head" in per and "head" not in dims) or ("position" in per and position is None):
            raise InputError(
                f"per={per!r} does not fit hook point {chosen!r}, whose dims are "
                f"{', '.join(dims) or 'not known'}; take 'all', or parts that it has"
            )
        n_heads = shape[dims.index("head")] if "head" in per else 0
        n_positions = shape[dims.index(str(position))] if "position" in per else 0
        return chosen, (n_heads, n_positions)

    def measure(
        self, weights: Weights, donor: Weights | None, hook: str, places: tuple[int, int]
    ) -> dict[str, np.ndarray]:
        """Return every measurement, of the whole and each part, and whether the donor is the same.

        NaN where it is not defined.
        """
        import torch

        from mechicl.models.interventions import record

        with torch.no_grad():
            model = self._hooked(weights)
            base = other = self._answers(model(self._reads)).astype(float)
            value: Tensor | Literal["zero", "mean"] = "zero"
            if self.source in ("zero", "mean"):
                value = "zero" if self.source == "zero" else "mean"
            else:
                giver = model if donor is None else self._hooked(donor)
                read = self._others if self.source == "prompt" else self._reads
                other = self._answers(giver(read)).astype(float)
                value = record(giver, read, [hook])[hook]
            terms = [
                self._terms(base, other, patched)
                for patched in self._patched(model, _patches(hook, value, places))
            ]
        return self._summed(np.concatenate(terms))

    def _patched(
        self, model: "HookedTransformer", patches: "Sequence[Patch]"
    ) -> Iterator[Float[np.ndarray, "variant batch *prediction"]]:
        from mechicl.models.interventions import run_each

        together = max(1, _OUTPUTS_AT_ONCE // len(self._reads))
        for start in range(0, len(patches), together):
            some = patches[start : start + together]
            # One a pass: in a stack, what a patch leaves alone could differ in its last bits.
            output = run_each(model, self._reads, some, at_once=1, unchanged="ignore")
            yield self._answers(output).astype(float)

    def _terms(
        self,
        base: Float[np.ndarray, "batch *prediction"],
        other: Float[np.ndarray, "batch *prediction"],
        patched: Float[np.ndarray, "variant batch *prediction"],
    ) -> Float[np.ndarray, "variant term pair"]:
        """Return what is averaged, of each pair of prompts."""
        with np.errstate(over="ignore", invalid="ignore"):
            change = self._loss(patched, self._targets) - self._loss(base, self._targets)
            whole = [
                each - each.mean(-1, keepdims=True) if self._logits else each
                for each in (base, other, patched)
            ]
            far = (whole[1] - whole[0]).reshape(len(base), -1)
            near = (whole[2] - whole[0]).reshape(len(patched), len(base), -1)
            products = (near * far).mean(-1), np.broadcast_to((far**2).mean(-1), near.shape[:2])
            terms = np.stack([*products, (near**2).mean(-1), change], 1)
        return terms.reshape(len(patched), len(terms[0]), -1, 2).mean(-1)

    def _summed(self, terms: Float[np.ndarray, "variant term pair"]) -> dict[str, np.ndarray]:
        moments = JointMoments()
        moments.add(terms)
        finite = np.isfinite(moments.mean).all(-1)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            product, square, moved, change = moments.mean.T
            recovered, zero = product / square, np.zeros_like(square)
            # d(product/square) = (d product − recovered · d square) / square.
            slopes = np.stack([np.ones_like(square), -recovered, zero, zero], -1)
            measured = {
                "recovered": recovered,
                "recovered_error": moments.error(slopes) / square,
                "moved": moved,
                "moved_error": moments.error(np.array([0.0, 0.0, 1.0, 0.0])),
                "loss_change": change,
                "loss_change_error": moments.error(np.array([0.0, 0.0, 0.0, 1.0])),
            }
        known = finite & np.isfinite(measured["recovered_error"])
        for name, values in measured.items():
            defined = known if name.startswith("recovered") else finite
            measured[name] = np.where(defined, values, np.nan)
        return measured | {"same": np.array((finite & ~known).any())}


def _donors(
    chosen: xr.Dataset,
    forward: Forward,
    source: Source,
    from_step: int | None,
    from_seed: int | None,
) -> xr.Dataset | None:
    """Return the parameters that donors have, (seed, step, ...) as the models; None: their own."""
    for name, value, taken in (
        ("from_step", from_step, "checkpoint"),
        ("from_seed", from_seed, "seed"),
    ):
        if value is not None and source != taken:
            raise InputError(f"{name}={value} is for source={taken}; given source={source}")
    seeds, steps = (chosen[dim].values.tolist() for dim in _MODEL[:2])
    if source == "checkpoint":
        given = _stored(forward, [steps[-1] if from_step is None else from_step], seeds)
        return given.isel(step=[0] * len(steps))
    if source == "seed" and from_seed is not None:
        return _stored(forward, steps, [from_seed]).isel(seed=[0] * len(seeds))
    if source == "seed":
        if len(seeds) == 1:
            raise InputError(
                f"source=seed takes the donor from another seed, and {seeds[0]} alone is analysed; "
                "give from_seed"
            )
        return chosen.isel(seed=np.roll(np.arange(len(seeds)), -1))
    return None


def _stored(forward: Forward, steps: Sequence[int], seeds: Sequence[int]) -> xr.Dataset:
    if forward.checkpoints is None:
        raise InputError("probe 'activation_patching' needs a Forward with checkpoints")
    return forward.checkpoints(steps, seeds)


def _broken(donors: xr.Dataset) -> np.ndarray:
    return nonfinite(donors).transpose(*_MODEL).values


def _weights(parameters: xr.Dataset, seed: int, step: int) -> Weights:
    """Return one checkpoint's parameters in float64, by position."""
    one = parameters.isel(seed=seed, step=step)
    return {
        str(name): one[name].values.astype(float)
        for name, value in parameters.data_vars.items()
        if {*_MODEL} <= {*value.dims}
    }


def _default(model: "HookedTransformer") -> str:
    last = len(model.blocks) - 1
    for name in _PREFERRED:
        if f"blocks.{last}.{name}" in model.hook_dict:
            return f"blocks.{last}.{name}"
    known = ", ".join(model.hook_dict)
    raise InputError(f"the last block has none of {', '.join(_PREFERRED)}; give hook=, of {known}")


def _position(dims: Sequence[str]) -> str | None:
    return next((dim for dim in ("pos", "query_pos", "query") if dim in dims), None)


def _patches(
    hook: str, value: "Tensor | Literal['zero', 'mean']", places: tuple[int, int]
) -> "list[Patch]":
    """Return the patch of all of a hook point, and that of each part of it."""
    from mechicl.models.hooked import hook_dims
    from mechicl.models.interventions import Patch

    patches = [Patch(hook, value)]
    for head, position in product(*(range(size) if size else (None,) for size in places)):
        at = {} if head is None else {"head": head}
        if position is not None:
            at[str(_position(hook_dims(hook)))] = position
        patches.append(Patch(hook, value, at))
    return patches
