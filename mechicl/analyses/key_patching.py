"""What a context is worth that is read with the keys of another: raj2026, Fig. 4c and d."""

from typing import TYPE_CHECKING, Annotated

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float

from mechicl.analyses import transplants
from mechicl.analyses.evaluation import spread_steps, squared_error
from mechicl.analyses.heads import NONFINITE, nonfinite
from mechicl.analyses.pooled import POOLED, TREE, tree_prior
from mechicl.analyses.probe import Forward, probe, undefined_codes, verdict
from mechicl.analyses.transplants import NONFINITE_PREDICTIONS, QUERIES, Donors, mean_and_error
from mechicl.schema import Var

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import HookedTransformer

_MODEL = ("seed", "step")
_TABLE = (*_MODEL, "patch_layer", "tree_distance")
_LAYER = Var(("patch_layer",), "1", "first layer with a donor's keys; the last is no patch", 0)
_DISTANCE = Var(("tree_distance",), "1", "distance of the donor's leaf; 0 is the same leaf", 0)
_MEASURED = ("loss", "loss_error", "increase", "increase_error")


def tree_and_mlps(trajectory: xr.Dataset) -> str | None:
    """Apply where there are leaves, and keys that a context may choose."""
    reason = tree_prior(trajectory)
    if reason is None and not bool(trajectory["feedforward"]):
        return "it patches the keys that MLPs make, and this model has none"
    return reason


@probe(
    needs=POOLED | QUERIES,
    wants=TREE,
    gives={
        "patch_layer": _LAYER,
        "tree_distance": _DISTANCE,
        "loss": Var(_TABLE, "1", "mean squared error on the target's queries", 0),
        "loss_error": Var(_TABLE, "1", "standard error of loss", 0),
        "increase": Var(_TABLE, "1", "loss less that without a patch, on the same contexts"),
        "increase_error": Var(_TABLE, "1", "paired standard error of increase", 0),
        "clean_loss": Var(_MODEL, "1", "loss without a patch", 0),
        "clean_error": Var(_MODEL, "1", "standard error of clean_loss", 0),
        "effect": Var(_MODEL, "1", "increase for the farthest leaf, patched from the first layer"),
        "effect_error": Var(_MODEL, "1", "paired standard error of effect", 0),
        "same_leaf": Var(_MODEL, "1", "largest increase for the same leaf, over layers"),
        "own_keys": Var(_MODEL, "1", "increase by the keys that the context itself made"),
        "n_contexts": Var((), "1", "contexts that have a donor at every distance", 0),
    },
    statement="keys of another leaf cost more the farther it is and the earlier they enter",
    undefined=(NONFINITE, NONFINITE_PREDICTIONS, "fewer_than_two_contexts_with_donors"),
    headline=("clean_loss", "effect", "same_leaf"),
    applies=tree_and_mlps,
    references=("raj2026 section II, Figs 4c and 4d",),
    forward=True,
)
def key_patching(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    n_prompts: Annotated[int, pydantic.Field(ge=2, le=65536)] = 1024,
    n_queries: Annotated[int, pydantic.Field(ge=1)] = 4,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 1,
    margin: Annotated[float, pydantic.Field(ge=0)] = 3.0,
    negligible: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.05,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Measure the loss on contexts of one leaf under keys that contexts of another leaf chose.

    A pool of prompts is drawn. Each is a target, and has a donor from the pool at every tree
    distance k = 0 … h: a context whose leaf shares the first h − k spins with the target's and
    differs in the next, and at k = 0 another context of the same leaf. Donors of a distance are
    matched to targets at random, each as often as the next. A donor's dynamic keys K_ℓ (eq. 6) are
    those of its own run; in the run of the target they replace its own in all layers ℓ ≥ ℓ₀.
    Values, tokens, queries and the readout stay the target's. L is the number of layers.

    - `patch_layer` = ℓ₀ from 0, the first layer, to L: no patch. `tree_distance` = k.
    - `loss` (seed, step, patch_layer, tree_distance) = mean over targets of ⟨(θᵀx − ŷ)²⟩ over the
      queries; `loss_error` its standard error over targets. Without a patch it is that of
      one run, whatever the distance.
    - `increase` = `loss` less that without a patch; `increase_error` its paired standard error,
      from the differences on the same target.
    - `clean_loss`, `clean_error` (seed, step): `loss` without a patch.
    - `effect`, `effect_error` (seed, step): `increase` at k = h and ℓ₀ = 0.
    - `same_leaf` (seed, step): the `increase` at k = 0 that is largest in size over ℓ₀.
    - `own_keys` (seed, step): the increase where a target is given its own keys, recorded as
      donors' are, in all layers: 0 but for rounding.
    - `n_contexts`: targets with a donor at every distance; the others are left out throughout.

    Losses are in units of y².

    `holds`, with differences paired and errors those of the mean difference:

    - `effect` is above `margin` times its error;
    - at ℓ₀ = 0 the loss falls in no step from a distance to the next, and at k = h it rises in none
      from a layer to the next, or by at most `margin` errors or `negligible` of `effect`;
    - the controls are flat: at k = 0 `increase` is in size at most `margin` errors or `negligible`
      of `effect`, for every ℓ₀, and `own_keys` at most `negligible` of it.

    So steps may have no size: keys of the first layer do not depend on the context, for the
    workspace is constant there, and ℓ₀ = 0 and 1 are the same; and leaves need not differ that part
    below what the model measures. A model of one layer has an increase of 0 throughout, and `holds`
    is 0.

    When it misleads: that keys are the donor's says nothing of whether they were good. The same
    leaf is not without effect where noise leads the donor, or the target, astray; it is small then,
    and enough prompts tell it from 0: hence `negligible`. Targets share donors and are donors, so
    that errors leave out what that correlates. A part of the effect may be that a later layer reads
    measurements that it has not met in training, rather than lack of information.

    Undefined: weights that are not finite; losses that overflow; fewer than two targets with a
    donor at every distance, in a pool that is small for the number of leaves.

    Parameters
    ----------
    n_prompts
        Size of the pool. Memory holds the keys of all of it.
    n_queries
        At most so many of a prompt's queries are answered. They are most of the work, and more
        prompts lower the errors by more than as many more queries do.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first); 1 takes
        the last.
    margin
        How many standard errors a difference has to have.
    negligible
        Part of `effect` up to which a difference against what is claimed counts as none.
    evaluation_seed
        Seed of the pool and of the choice of donors.

    References
    ----------
    raj2026, section II and Figs 4c and 4d.
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    depth, n_layers = int(trajectory["depth"]), trajectory.sizes["layer"]
    cut = transplants.parts(n_prompts, forward, evaluation_seed)
    leaves = np.concatenate(
        [
            transplants.sample(forward, size, evaluation_seed, part)["leaf"].values
            for size, part in cut
        ]
    )
    donors = transplants.choose_donors(
        leaves, depth, np.random.default_rng([evaluation_seed, n_prompts])
    )
    pool = _Pool(forward, evaluation_seed, cut, donors, n_layers, n_queries)
    found = transplants.steps(chosen, forward, lambda models: pool.measure(models, margin))
    layers = np.arange(n_layers + 1)
    coords = {dim: chosen[dim] for dim in _MODEL} | {
        "patch_layer": ("patch_layer", layers, _LAYER.attrs),
        "tree_distance": ("tree_distance", np.arange(depth + 1), _DISTANCE.attrs),
    }
    data = {name: (_TABLE if value.ndim == 4 else _MODEL, value) for name, value in found.items()}
    result = xr.Dataset(data, coords=coords)
    share = negligible * result["effect"]
    controls = abs(result["increase"].isel(tree_distance=0))
    errors = margin * result["increase_error"].isel(tree_distance=0)
    condition = (
        (result["effect"] > margin * result["effect_error"])
        & (result["against"] <= share)
        & ((controls <= errors) | (controls <= share)).all("patch_layer")
        & (abs(result["own_keys"]) <= share)
    )
    broken, missing = nonfinite(chosen), transplants.any_missing(result, _MEASURED)
    few = xr.full_like(broken, pool.n_contexts < 2)
    return result.drop_vars("against").assign(
        n_contexts=float(pool.n_contexts),
        holds=verdict(condition, missing),
        undefined=undefined_codes(
            {
                NONFINITE: broken,
                NONFINITE_PREDICTIONS: missing & ~few,
                "fewer_than_two_contexts_with_donors": few,
            }
        ),
    )


class _Pool:
    """Prompts, drawn anew for each step, and which of them give their keys to which."""

    def __init__(
        self,
        forward: Forward,
        seed: int,
        cut: list[tuple[int, int]],
        donors: Donors,
        n_layers: int,
        n_queries: int,
    ) -> None:
        self._forward, self._seed, self._cut = forward, seed, cut
        self._donors = donors.index
        self._kept = np.asarray(donors.found.all(-1))
        self._n_layers, self._n_queries = n_layers, n_queries
        self._names = [f"blocks.{layer}.attn.hook_dynamic_key" for layer in range(n_layers)]
        self.n_contexts = int(self._kept.sum())

    def measure(self, models: transplants.Models, margin: float) -> dict[str, np.ndarray]:
        """Return what one step gives: (seed, patch_layer, tree_distance), and (seed)."""
        loss, own = self._losses(models)
        clean = loss[:, -1, 0]
        with np.errstate(invalid="ignore"):
            increase, of_own = loss - clean[:, None, None], own - clean
            by_distance, by_layer = np.diff(loss[:, 0], axis=1), np.diff(loss[:, :, -1], axis=1)
        found: dict[str, np.ndarray] = {}
        for name, values in (("loss", loss), ("increase", increase)):
            found[name], found[f"{name}_error"] = mean_and_error(values)
        found["clean_loss"], found["clean_error"] = mean_and_error(clean)
        found["own_keys"], _ = mean_and_error(of_own)
        found["effect"] = found["increase"][:, 0, -1]
        found["effect_error"] = found["increase_error"][:, 0, -1]
        same: np.ndarray = found["increase"][..., 0]
        largest = np.argmax(np.abs(np.nan_to_num(same)), -1)
        found["same_leaf"] = np.take_along_axis(same, largest[:, None], -1)[:, 0]
        # What is not to be below 0: steps up in distance under the keys of all layers, and steps
        # down with the layer at the farthest.
        mean, error = mean_and_error(np.concatenate([by_distance, -by_layer], 1))
        worst = np.where(mean >= -margin * error, 0.0, np.maximum(-mean, 0.0)).max(-1)
        found["against"] = np.where(np.isfinite(mean).all(-1), worst, np.nan)
        return found

    def _losses(
        self, models: transplants.Models
    ) -> tuple[
        Float[np.ndarray, "seed patch_layer tree_distance context"],
        Float[np.ndarray, "seed context"],
    ]:
        """Return the loss of every target under each patch, and under keys of its own."""
        from mechicl.models.interventions import Patch, run_patched

        keys = self._keys(models)
        shape = (models.n_seeds, self._n_layers + 1, self._donors.shape[1], self.n_contexts)
        loss, own = np.full(shape, np.nan), np.full((shape[0], shape[-1]), np.nan)
        first, done = 0, 0
        for size, part in self._cut:
            here = np.arange(first, first + size)[self._kept[first : first + size]]
            some = transplants.sample(self._forward, size, self._seed, part)
            inputs = models.reads(some["inputs"].values[here - first])
            targets = some["targets"].values[here - first, : self._n_queries]
            at = slice(done, done + len(here))
            first, done = first + size, done + len(here)
            if not len(here):
                continue

            def one(
                seed: int,
                model: "HookedTransformer",
                here: np.ndarray = here,
                inputs: "Tensor" = inputs,
                targets: np.ndarray = targets,
                at: slice = at,
            ) -> None:
                def under(source: np.ndarray, start: int) -> np.ndarray:
                    """Return losses under keys of other contexts from a layer on."""
                    given = keys[seed][source]
                    patches = [
                        Patch(name, given[:, layer])
                        for layer, name in enumerate(self._names)
                        if layer >= start
                    ]
                    output = run_patched(model, inputs, patches, unchanged="ignore")
                    return squared_error(output.numpy(), targets)

                with transplants.few_queries(model, self._n_queries):
                    loss[seed, -1, :, at] = squared_error(model(inputs).numpy(), targets)
                    own[seed, at] = under(here, 0)
                    for start, distance in np.ndindex(self._n_layers, shape[2]):
                        source = self._donors[here, distance]
                        loss[seed, start, distance, at] = under(source, start)

            models.each(one)
        return loss, own

    def _keys(
        self, models: transplants.Models
    ) -> "dict[int, Float[Tensor, 'context layer channel d_model']]":
        """Return the dynamic keys of every context of the pool, by seed."""
        import torch

        from mechicl.models.interventions import record

        found: dict[int, list[Tensor]] = {}
        for size, part in self._cut:
            some = transplants.sample(self._forward, size, self._seed, part)
            inputs = models.reads(some["inputs"].values)

            def one(seed: int, model: "HookedTransformer", inputs: "Tensor" = inputs) -> None:
                with transplants.few_queries(model, 1):
                    passed = record(model, inputs, self._names)
                stacked = torch.stack([passed[name] for name in self._names], 1)
                found.setdefault(seed, []).append(stacked)

            models.each(one)
        return {seed: torch.cat(each) for seed, each in found.items()}
