"""What heads write against the features of the chain: V_k against A*_k of yuksel2026."""

import numpy as np
import xarray as xr

from mechicl.analyses.heads import NONFINITE, Threshold, nonfinite, quotient
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.analyses.spans import BLOCK, block_axis
from mechicl.schema import Var

_RUN = ("seed", "step")
_HEAD = (*_RUN, "layer", "head")
_MATRIX = ("next_state", "state")
_MINIMAL = {"OV": Var((*_HEAD, "d_out", "d_in"), "1", "OV circuit, times tau in logits")}
_DECODER = {
    "W_E": Var((*_RUN, "d_vocab", "d_model"), "1", "token embedding"),
    "W_V": Var((*_HEAD, "d_model", "d_head"), "1", "value projection"),
    "W_O": Var((*_HEAD, "d_head", "d_model"), "1", "output projection"),
    "W_U": Var((*_RUN, "d_model", "d_vocab"), "1", "unembedding, times tau in logits"),
}
_NOTHING = 1e-6
"""A centred part below this of the whole is what float32 has rounded."""


def _maps_tokens_to_logits(trajectory: xr.Dataset) -> str | None:
    """Apply where a run has OV circuits over its states, or what makes them in a decoder."""
    d = trajectory["features"].sizes["state"]
    if "OV" in trajectory:
        out, read = trajectory["OV"].sizes["d_out"], trajectory["OV"].sizes["d_in"]
        if out == d <= read:
            return None
        return f"it reads OV over d = {d} states, and here OV is {out}×{read}"
    missing = [name for name in _DECODER if name not in trajectory]
    if missing:
        return f"it reads OV, or {', '.join(_DECODER)}, and the run has no {', '.join(missing)}"
    return None


@probe(
    needs={"features": Var(("block", *_MATRIX), "1", "feature matrices A*, tau times logits")},
    wants=_MINIMAL | _DECODER,
    gives=BLOCK
    | {
        "cosine": Var((*_HEAD, "block"), "1", "cosine of value map and feature matrix", -1, 1),
        "projection": Var(
            (*_HEAD, "block"), "1", "value map along the feature matrix, over its size"
        ),
        "total_projection": Var(
            (*_RUN, "layer", "block"), "1", "projection, summed over the heads of a layer"
        ),
        "n_aligned": Var(_RUN, "1", "number of feature matrices that a head is aligned with", 0),
    },
    statement="every feature matrix has a head whose value map is aligned with it",
    undefined=(NONFINITE, "zero_feature", "zero_value_map"),
    headline=("n_aligned",),
    applies=_maps_tokens_to_logits,
    references=("yuksel2026 (1) and section 2.3: V_k = A*_k", "yuksel2026 section 3, Theorem 1"),
)
def value_alignment(trajectory: xr.Dataset, *, align_threshold: Threshold = 0.5) -> xr.Dataset:
    """Measure cosine and projection of every head's value map on every feature matrix.

    M_h (next_state, state) is what an attended token adds to the logits, times τ as the features
    are: the part of OV that reads tokens or, in a decoder, (W_E W_V W_O W_U)ᵀ. A constant added to
    all logits after an input token changes no prediction: M_h and A*_k are centred over
    next_state. ⟨A, B⟩ = tr AᵀB, in float64; all is without units.

    - `cosine` (seed, step, layer, head, block) = ⟨M_h, A*_k⟩ / (‖M_h‖ ‖A*_k‖), in [−1, 1]; 1 for a
      head of the construction of section 2.3.
    - `projection` (seed, step, layer, head, block) = ⟨M_h, A*_k⟩ / ⟨A*_k, A*_k⟩: 1 where one head
      alone has learnt the feature, 1/h each where h heads share it, negative where a head takes
      from it what others have too much.
    - `total_projection` (seed, step, layer, block): its sum over the heads of a layer.
    - `n_aligned` (seed, step): feature matrices with a head, of whatever layer, whose cosine is
      above `align_threshold`. `holds`: all are.

    `block` is numbered from 1, as in `attention_spans`.

    When it misleads: a value map says what a head makes of a token, not which tokens it looks at:
    take it with `attention_spans`. A head with mass a on its block needs 1/a of the feature, so the
    projection of one that is learnt is above 1 while a is below. Features are orthogonal to each
    other at large d alone (unless the task makes them so), and a map along one then has a cosine of
    about 1/d with the others. Heads can trade constants, M_h + v_h1ᵀ with Σ_h v_h = 0, and predict
    as before. Of an orthogonal feature that part is about 1/d of the square: where other heads have
    it, what is learnt has a cosine of √(1 − 1/d) and a projection of 1 − 1/d. In a decoder this is
    the direct path alone: gains of layer norm, the MLP and later layers are left out. Layer norm
    scales what a head writes, so that the projection is in no fixed unit; where the MLP or a second
    layer does the work the cosine is low though the feature is learnt.

    Undefined: weights that are not finite; a feature matrix that after centring is 0 (its block
    alone); a value map that is, as every OV at the start (its `cosine`; its projection is 0). A
    matrix counts as 0 where centring leaves less than 1e-6 of it, the rounding of float32.

    Parameters
    ----------
    align_threshold
        Cosine that a head has to exceed.

    References
    ----------
    yuksel2026, (1), the construction of section 2.3, and Theorem 1 (V → A*_1/h in the competitive
    phase).
    """
    broken = nonfinite(trajectory[[name for name in _MINIMAL | _DECODER if name in trajectory]])
    features, no_feature = _centred(trajectory["features"].astype(float))
    maps, no_map = _centred(value_maps(trajectory).where(~broken))
    n_blocks = features.sizes["block"]
    features, no_feature = (
        each.drop_vars("block", errors="ignore").assign_coords(block=block_axis(n_blocks))
        for each in (features, no_feature)
    )
    product = xr.dot(maps, features, dim=_MATRIX)
    square, size = (features**2).sum(_MATRIX), (maps**2).sum(_MATRIX, skipna=False)
    cosine = quotient(product, (size * square) ** 0.5).clip(-1.0, 1.0).where(~no_map & ~no_feature)
    projection = quotient(product, square).where(~no_feature)
    aligned_blocks = (cosine > align_threshold).any(["layer", "head"])
    count = aligned_blocks.sum("block").astype(float)
    return xr.Dataset(
        {
            "cosine": cosine,
            "projection": projection,
            "total_projection": projection.sum("head", skipna=False),
            "n_aligned": count.where(~broken),
            "holds": verdict(count == n_blocks, broken),
            "undefined": undefined_codes(
                {
                    NONFINITE: broken,
                    "zero_feature": xr.full_like(broken, bool(no_feature.any()), dtype=bool),
                    "zero_value_map": no_map.any(["layer", "head"]),
                }
            ),
        }
    )


def value_maps(trajectory: xr.Dataset) -> xr.DataArray:
    """Return M_h of every head: how an attended token enters the logits, times τ.

    Returns
    -------
    xr.DataArray
        (seed, step, layer, head, next_state, state), float64: the token part of OV or, in a
        decoder, (W_E W_V W_O W_U)ᵀ, its direct path without layer norm. Source: yuksel2026, section
        2.3.
    """
    if "OV" in trajectory:
        d = trajectory["features"].sizes["state"]
        ov = trajectory["OV"].astype(float).isel(d_in=slice(d))
        return ov.rename(d_out="next_state", d_in="state").drop_vars(_MATRIX, errors="ignore")
    embed, values, outputs, unembed = (trajectory[name].astype(float) for name in _DECODER)
    with np.errstate(invalid="ignore"):
        read = xr.dot(embed.rename(d_vocab="state"), values, dim="d_model")
        written = xr.dot(outputs, unembed.rename(d_vocab="next_state"), dim="d_model")
        return xr.dot(read, written, dim="d_head")


def _centred(matrices: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Take the mean over next_state off, and say which matrices then are 0."""
    centred = matrices - matrices.mean("next_state", skipna=False)
    left, whole = (abs(each).max(_MATRIX, skipna=False) for each in (centred, matrices))
    return centred, left <= _NOTHING * whole
