"""What each layer of a pooling model measures of θ, and whether that depends on what was read."""

from typing import Annotated

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float, Int

from mechicl.analyses.evaluation import Moments, spread_steps
from mechicl.analyses.heads import NONFINITE, nonfinite
from mechicl.analyses.pooled import POOLED, TREE, dynamic_keys, samples, tree_prior
from mechicl.analyses.probe import Forward, probe, undefined_codes, verdict
from mechicl.schema import Var

_MODEL = ("seed", "step")
_CHANNEL = (*_MODEL, "layer", "channel")
_BY_DEPTH = (*_CHANNEL, "node_depth")
_DEPTH = Var(("node_depth",), "1", "depth of a node, 0 the root", 0)

GIVES = {
    "node_depth": _DEPTH,
    "on_path": Var(_BY_DEPTH, "1", "squared cosine of w with the node of the leaf", 0, 1),
    "on_path_error": Var(_BY_DEPTH, "1", "standard error of on_path", 0),
    "level": Var(_BY_DEPTH, "1", "share of the square of w on all nodes of a depth", 0, 1),
    "measured_depth": Var(_CHANNEL, "1", "depth of the node most on the path", 0),
    "variation": Var(_CHANNEL, "1", "share of the square of w that varies by context", 0, 1),
    "explained": Var(_BY_DEPTH, "1", "part of variation that spins above a depth explain"),
    "sign_effect": Var(_CHANNEL, "1", "1 - cosine of w between signs read before", 0, 2),
    "routed": Var(_MODEL, "1", "explained by the leaf, in the layer where it is least"),
    "routed_layers": Var(_MODEL, "1", "layers after the first that route", 0),
}
_MEASURED = tuple(name for name in GIVES if name not in ("node_depth", "routed", "routed_layers"))


def _keys_are_made(trajectory: xr.Dataset) -> str | None:
    if not bool(trajectory["feedforward"]):
        return "its keys are fixed: a model without feedforward routes nothing"
    return tree_prior(trajectory)


@probe(
    needs=POOLED,
    wants=TREE,
    gives=GIVES,
    statement="every layer after the first measures what depends on the leaf",
    undefined=(NONFINITE, "nonfinite_keys", "zero_measurement", "too_few_contexts", "one_layer"),
    headline=("routed", "routed_layers"),
    applies=_keys_are_made,
    references=("raj2026 section II, (6), (16)",),
    forward=True,
)
def routing(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 2048,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 1,
    threshold: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.1,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Measure where on the tree each channel of each layer looks, and what decides that.

    A channel pools φ = ⟨(v·z)(k·z)⟩ = kᵀGv with z = (x, y) and G = ⟨zzᵀ⟩, in blocks

        φ = k_x·G_xx v_x + (v_y k_x + k_y v_x)·G_xy + k_y v_y G_yy.

    θ is in G_xy = θ + ξ. For long contexts G_xx is I and G_yy is |θ|² + σ², a constant on the tree,
    each with noise. So a channel measures θ along w = v_y k_x + k_y v_x, (covariate), which differs
    by context as its dynamic key k does. A covariate is a node of the tree. ⟨·⟩ is the mean over a
    fixed set of contexts; indices of a layer and channel are left out.

    - `on_path` (seed, step, layer, channel, node_depth) = ⟨w_v²/|w|²⟩, v the node at depth
      `node_depth` on the way to the context's own leaf, 0 to 1; `on_path_error` its standard error
      over contexts.
    - `level` = ⟨Σ w_v²/|w|²⟩ over all nodes of that depth, 0 to 1, summing to 1 over depths. A
      measurement that knows the way has `on_path` = `level`; one that is symmetric in the nodes of
      depth m, as μ_m of (5), has `on_path` = 2^−m `level`.
    - `measured_depth` (seed, step, layer, channel): the depth of the largest `on_path`.
    - `variation` = ⟨|w − ⟨w⟩|²⟩/⟨|w|²⟩, 0 for a key that does not depend on the context, exactly so
      in layer 0, up to 1.
    - `explained` (…, node_depth): the part of `variation` that the first m spins of the leaf
      explain, those on the way to depth m: `variation` (1 − W_m/T), with T and W_m the unbiased
      variances of w over all contexts and within groups of equal first spins. 0 at m = 0, at most
      `variation`; divided by it, the share explained.
    - `sign_effect`: whether w depends on the sign that the layer before measured. With m its
      `measured_depth` (of the channel most on the path), groups of contexts share s_1 … s_m; in
      each, w₊ and w₋ are the means of w at s_{m+1} = ±1. The effect is 1 − ⟨w₊·w₋⟩/⟨½|w₊|² +
      ½|w₋|²⟩, with unbiased estimates of products and squares: 1 − cosine where the two are as
      long. 0 where the sign does not matter, and in layer 0; 1 for w on one child or the other, up
      to 2.
    - `routed` (seed, step): `explained` at the last depth in the channel where it is most, in the
      layer after the first where that is least; `routed_layers`: in how many of these it is above
      `threshold`.
    - `holds`: `routed` is above `threshold`: all of them.

    None has units.

    When it misleads: φ also has k_x·v_x and k_y v_y (|θ|² + σ²), which move with the key and say
    nothing new of θ. A fixed measurement of many nodes reads several spins at once: it is not on
    the path, and its layer may do no worse for that. `level` is of the axis of nodes, which is not
    the only basis: a w spread over nodes is not a w without structure. `explained` sees spins
    alone: what of the key depends on the noise of φ, as a wrong turn does, is the rest of
    `variation`. With one channel, what layer 0 adds to the workspace is φ times a fixed vector, of
    which normalisation leaves the sign: layer 1 has two keys at most, and one where φ, constants
    included, never changes its sign. `sign_effect` takes the layer before at its `measured_depth`,
    however little of w is there.

    Undefined: weights or keys that are not finite; all that divides by |w| where w = 0 in some
    context; `explained` and `sign_effect` where leaves have too few contexts for a variance, or the
    mean of w is lost in its noise; `routed`, `routed_layers` and `holds` with one layer, which has
    nothing before it.

    Parameters
    ----------
    n_prompts
        Contexts, several for each leaf.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first); 1 takes
        the last.
    threshold
        Least `explained` of a layer that routes.
    evaluation_seed
        Seed of the contexts.

    References
    ----------
    raj2026, section II (the adaptive strategy), (6) and (16).
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    names = [str(name) for name, value in chosen.items() if {*_MODEL} <= {*value.dims}]
    chosen = chosen[names].transpose(*_MODEL, ...)
    depth, broken = int(trajectory["depth"]), nonfinite(chosen)
    tallies = {
        model: Tally(depth) for model in np.ndindex(broken.shape) if not broken.values[model]
    }
    for sample in samples(forward, n_prompts, evaluation_seed):
        inputs = sample["inputs"].values
        for model, tally in tallies.items():
            weights = {name: chosen[name].values[model] for name in names}
            keys = dynamic_keys(forward, weights, inputs)
            tally.add(measured(keys, weights["W_V"].astype(float)), sample["leaf"].values)
    inner = {name: GIVES[name].dims[2:] for name in _MEASURED}
    sizes = {**chosen["W_V"].sizes, "node_depth": depth}
    found = {
        name: np.full((*broken.shape, *(sizes[dim] for dim in dims)), np.nan)
        for name, dims in inner.items()
    }
    overflown = broken.copy(data=np.zeros(broken.shape, bool))
    for model, tally in tallies.items():
        overflown.values[model] = not tally.finite
        for name, value in tally.measure().items() if tally.finite else ():
            found[name][model] = value
    result = xr.Dataset(
        {name: ((*_MODEL, *dims), found[name]) for name, dims in inner.items()},
        coords={dim: chosen[dim] for dim in _MODEL}
        | {"node_depth": ("node_depth", np.arange(depth), _DEPTH.attrs)},
    )
    one_layer = sizes["layer"] == 1
    later = result["explained"].isel(node_depth=-1, layer=slice(0 if one_layer else 1, None))
    alone = broken.copy(data=np.full(broken.shape, one_layer))
    reasons = {
        NONFINITE: broken,
        "nonfinite_keys": overflown,
        "zero_measurement": _missing(result["on_path"]),
        "too_few_contexts": _missing(result["explained"]) | _missing(result["sign_effect"]),
        "one_layer": alone,
    }
    by_layer = later.max("channel", skipna=False)
    routed = by_layer.min("layer", skipna=False).where(~alone)
    return result.assign(
        routed=routed,
        routed_layers=(by_layer > threshold).sum("layer").where(routed.notnull()),
        holds=verdict(routed > threshold, routed.isnull()),
        undefined=undefined_codes(reasons),
    )


def measured(
    keys: Float[np.ndarray, "batch layer channel d_model"],
    values: Float[np.ndarray, "layer channel d_model"],
) -> Float[np.ndarray, "batch layer channel covariate"]:
    """Return w = v_y k_x + k_y v_x, along which each channel measures θ."""
    return values[..., -1:] * keys[..., :-1] + keys[..., -1:] * values[..., :-1]


class Tally:
    """Sums over contexts of what channels measure, which come in parts.

    Only sums by leaf are kept, so that memory does not grow with the contexts.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.finite = depth, True
        self._on_path, self._level = Moments(), Moments()
        self._count = np.zeros(2**depth)
        self._origin = self._sums = self._squares = np.array(0.0)

    def add(
        self,
        w: Float[np.ndarray, "batch layer channel covariate"],
        leaf: Int[np.ndarray, " batch"],
    ) -> None:
        """Take in the measurements that some contexts meet, and the leaves of these."""
        self.finite = self.finite and bool(np.isfinite(w).all())
        if not self.finite:
            return
        if self._origin.ndim == 0:
            # Sums are of what differs from one context: what never varies cancels exactly.
            self._origin = w[0]
            self._sums = np.zeros((2**self.depth, *w.shape[1:]))
            self._squares = np.zeros((2**self.depth, *w.shape[1:-1]))
        self._count += np.bincount(leaf, minlength=2**self.depth)
        shifted = w - self._origin
        np.add.at(self._sums, leaf, shifted)
        np.add.at(self._squares, leaf, (shifted**2).sum(-1))
        squares = w**2
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = squares / squares.sum(-1, keepdims=True)
        levels = np.arange(self.depth)
        nodes = 2**levels - 1 + (leaf[:, None] >> (self.depth - levels))
        self._on_path.add(np.moveaxis(_at(shares, nodes), 0, -1))
        starts = 2**levels - 1
        self._level.add(np.moveaxis(np.add.reduceat(shares, starts, axis=-1), 0, -1))

    def measure(self) -> dict[str, np.ndarray]:
        """Return what `routing` gives for one model, (layer, channel, ...)."""
        on_path = self._on_path.mean
        none = np.isnan(on_path).any(-1)
        return {
            "on_path": on_path,
            "on_path_error": self._on_path.error,
            # Rounding may leave a share an ulp above 1.
            "level": np.minimum(self._level.mean, 1.0),
            "measured_depth": np.where(none, np.nan, on_path.argmax(-1)),
            "sign_effect": np.where(none, np.nan, self._sign_effect(on_path)),
        } | {
            name: np.where(none.reshape(none.shape + (1,) * (value.ndim - 2)), np.nan, value)
            for name, value in self._variances().items()
        }

    def _variances(self) -> dict[str, np.ndarray]:
        n, total = self._count.sum(), self._within(0)
        means = self._sums.sum(0) / n + self._origin
        norm = total + n * (means**2).sum(-1)  # Σ|w|²
        with np.errstate(invalid="ignore", divide="ignore"):
            variation = total / norm
            left = np.stack(
                [self._unbiased(spins) / self._unbiased(0) for spins in range(self.depth)], -1
            )
            explained = np.where(total[..., None] > 0, variation[..., None] * (1 - left), 0.0)
        return {"variation": np.clip(variation, 0, 1), "explained": explained}

    def _unbiased(self, spins: int) -> Float[np.ndarray, "layer channel"]:
        """Return the variance of w within groups of contexts that share their first spins."""
        groups = (self._by_prefix(self._count, spins) > 0).sum()
        freedom = self._count.sum() - groups
        return self._within(spins) / (freedom if freedom > 0 else np.nan)

    def _within(self, spins: int) -> Float[np.ndarray, "layer channel"]:
        """Return Σ|w − w̄|², w̄ the mean of the contexts that share their first spins."""
        count = self._by_prefix(self._count, spins)
        filled = count > 0
        sums = self._by_prefix(self._sums, spins)[filled]
        explained = ((sums**2).sum(-1) / count[filled, None, None]).sum(0)
        return np.maximum(self._squares.sum(0) - explained, 0.0)

    def _sign_effect(
        self, on_path: Float[np.ndarray, "layer channel node_depth"]
    ) -> Float[np.ndarray, "layer channel"]:
        effect = np.zeros(on_path.shape[:-1])
        for layer in range(1, len(effect)):
            before = on_path[layer - 1]
            if np.isnan(before).any():
                effect[layer] = np.nan
                continue
            spin = int(before[before.max(-1).argmax()].argmax())
            effect[layer] = self._between_signs(layer, spin)
        return effect

    def _between_signs(self, layer: int, spin: int) -> Float[np.ndarray, " channel"]:
        """Return 1 − ⟨w₊·w₋⟩/⟨½|w₊|² + ½|w₋|²⟩ between the signs of a spin, 0 the first."""
        count, sums, squares = (
            self._by_prefix(each, spin + 1)
            for each in (self._count, self._sums[:, layer], self._squares[:, layer])
        )
        origin = self._origin[layer]
        size = count[:, None]
        raw = sums + size[..., None] * origin
        raw_squares = squares + 2 * (sums * origin).sum(-1) + size * (origin**2).sum(-1)
        raw, raw_squares, size = (
            each.reshape(-1, 2, *each.shape[1:]) for each in (raw, raw_squares, size)
        )
        whole = (size[:, :, 0] > 1).all(1)
        if not whole.any():
            return np.full(len(origin), np.nan)
        raw, raw_squares, size = raw[whole], raw_squares[whole], size[whole]
        weight = size.sum(1)
        cross = (raw[:, 0] * raw[:, 1]).sum(-1) / size.prod(1)
        # Of the mean, without the part that a context has with itself.
        norms = ((raw**2).sum(-1) - raw_squares) / (size * (size - 1))
        norm = (weight * norms.mean(1)).sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = 1 - (weight * cross).sum(0) / norm
        return np.where(norm > 0, np.clip(found, 0, 2), np.nan)

    def _by_prefix(self, values: np.ndarray, spins: int) -> np.ndarray:
        """Sum values (leaf, ...) over leaves that share their first spins."""
        return values.reshape(2**spins, -1, *values.shape[1:]).sum(1)


def _at(
    shares: Float[np.ndarray, "batch layer channel covariate"],
    nodes: Int[np.ndarray, "batch node_depth"],
) -> Float[np.ndarray, "batch layer channel node_depth"]:
    return np.take_along_axis(shares, nodes[:, None, None, :], -1)


def _missing(values: xr.DataArray) -> xr.DataArray:
    return values.isnull().any([dim for dim in values.dims if dim not in _MODEL])
