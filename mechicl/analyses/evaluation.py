"""Evaluating models and references on fixed prompts: what forward probes share."""

from collections.abc import Iterable, Iterator

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from mechicl.analyses.probe import Forward, Probe
from mechicl.schema import Var

PART = 16384
"""Prompts drawn and evaluated at once, so that memory does not grow with the evaluation set."""


def spread_steps(steps: Int[np.ndarray, " step"], n: int) -> Int[np.ndarray, " chosen"]:
    """Return positions of at most `n` steps, even in log(1 + time since the first), ends in.

    A single one is the last.
    """
    if n == 1:
        return np.array([len(steps) - 1])
    since_first = np.log1p((steps - steps[0]).astype(float))
    wanted = np.linspace(0.0, since_first[-1], n)
    nearest = np.abs(since_first[:, None] - wanted).argmin(axis=0)
    return np.unique(np.append(nearest, [0, len(steps) - 1]))


def steps_of(probe: Probe, steps: Int[np.ndarray, " step"]) -> Int[np.ndarray, " chosen"]:
    """Return the steps that a probe's result is of, by default, where a run has `steps`.

    A forward probe takes `n_steps` of them, spread by `spread_steps`.
    """
    n = probe.resolve({}).get("n_steps") if probe.forward else None
    return steps if n is None else steps[spread_steps(steps, n)]


def shares(n: int) -> Iterator[tuple[int, int]]:
    """Cut `n` prompts into parts: yields (size, part), as `Forward.prompts` takes them."""
    for part, start in enumerate(range(0, n, PART)):
        yield min(PART, n - start), part


def predict_steps(
    chosen: xr.Dataset, forward: Forward, inputs: Float[np.ndarray, "batch pos d_model"]
) -> Iterator[Float[np.ndarray, "seed batch *response"]]:
    """Predict with the models of one step after another, in float64."""
    names = [name for name, value in chosen.data_vars.items() if {"seed", "step"} <= {*value.dims}]
    for index in range(chosen.sizes["step"]):
        one = chosen[names].isel(step=index).transpose("seed", ...)
        parameters = {str(name): one[name].values for name in names}
        yield forward.predict(parameters, inputs).astype(float)


def losses(
    chosen: xr.Dataset,
    forward: Forward,
    n_prompts: int,
    seed: int,
    *,
    n_context: int | None = None,
) -> tuple[xr.DataArray, xr.DataArray, "dict[str, Moments]"]:
    """Evaluate every model and every reference on the same prompts.

    Returns
    -------
    loss, error
        Mean squared error and its standard error, (seed, step); NaN where a model's loss is not
        finite.
    references
        The same of each reference, by name.
    """
    models = [Moments() for _ in range(chosen.sizes["step"])]
    references: dict[str, Moments] = {}
    for size, part in shares(n_prompts):
        inputs, targets = forward.prompts(size, seed, part=part, n_context=n_context)
        for model, predicted in zip(models, predict_steps(chosen, forward, inputs), strict=True):
            model.add(squared_error(predicted, targets))
        for name, predicted in forward.references(inputs).items():
            references.setdefault(name, Moments()).add(squared_error(predicted, targets))
    coords = {dim: chosen[dim] for dim in ("seed", "step")}
    loss = xr.DataArray(np.stack([each.mean for each in models], -1), coords, ("seed", "step"))
    error = loss.copy(data=np.stack([each.error for each in models], -1))
    defined = np.isfinite(loss)
    return loss.where(defined), error.where(defined), references


def squared_error(
    predictions: Float[np.ndarray, "*models_batch_response"],
    targets: Float[np.ndarray, "batch *response"],
) -> Float[np.ndarray, "*models batch"]:
    """Return the squared error of each prompt, averaged over its responses."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = (np.asarray(predictions, dtype=float) - targets) ** 2
    return squares if targets.ndim == 1 else squares.mean(-1)


class Moments:
    """Mean and standard error of values (..., batch) that come in parts."""

    def __init__(self) -> None:
        self._n = 0
        self._mean: np.ndarray = np.array(0.0)
        self._squares: np.ndarray = np.array(0.0)

    def add(self, values: Float[np.ndarray, "*models batch"]) -> None:
        """Take in one part."""
        n = values.shape[-1]
        with np.errstate(over="ignore", invalid="ignore"):
            mean = values.mean(-1)
            squares = ((values - mean[..., None]) ** 2).sum(-1)
            # Chan's update: parts are merged without the cancellation of a sum of squares.
            total, shift = self._n + n, mean - self._mean
            self._squares = self._squares + squares + shift**2 * self._n * n / total
            self._mean = self._mean + shift * n / total
        self._n = total

    @property
    def mean(self) -> Float[np.ndarray, "*models"]:
        """Mean over all prompts."""
        return self._mean

    @property
    def error(self) -> Float[np.ndarray, "*models"]:
        """Standard error of `mean`; NaN for a single prompt."""
        if self._n < 2:
            return np.full_like(self._mean, np.nan)
        return np.sqrt(self._squares / (self._n - 1) / self._n)


class JointMoments:
    """Means and covariances of k values (..., k, batch) that come in parts."""

    def __init__(self) -> None:
        self._n = 0
        self._mean: np.ndarray = np.array(0.0)
        self._products: np.ndarray = np.array(0.0)

    def add(self, values: Float[np.ndarray, "*models k batch"]) -> None:
        """Take in one part."""
        n = values.shape[-1]
        with np.errstate(over="ignore", invalid="ignore"):
            mean = values.mean(-1)
            centred = values - mean[..., None]
            shift = mean - self._mean
            # Chan's update, as in Moments.
            between = shift[..., :, None] * shift[..., None, :] * self._n * n / (self._n + n)
            self._products = self._products + centred @ centred.swapaxes(-1, -2) + between
            self._mean = self._mean + shift * n / (self._n + n)
        self._n += n

    @property
    def mean(self) -> Float[np.ndarray, "*models k"]:
        """Means over all prompts."""
        return self._mean

    def error(self, weights: Float[np.ndarray, "*models k"]) -> Float[np.ndarray, "*models"]:
        """Return the standard error of the sum of `weights` times means; NaN for one prompt."""
        with np.errstate(over="ignore", invalid="ignore"):
            products = np.einsum("...k,...kl,...l->...", weights, self._products, weights)
            if self._n < 2:
                return np.full_like(products, np.nan)
            # Rounding may leave a variance of 0 just below it.
            return np.sqrt(np.maximum(products, 0.0) / (self._n - 1) / self._n)


def reference_axis(names: Iterable[str]) -> xr.DataArray:
    """Return the axis of references; see `flag_axis`."""
    return flag_axis("reference", "reference predictor", names)


def flag_axis(dim: str, meaning: str, names: Iterable[str]) -> xr.DataArray:
    """Return an axis of things that have names: numbers, with names as CF flags.

    Labels of text do not survive a Zarr store; `mechicl.schema.flag_names` reads these back.
    """
    flags = dict(enumerate(names))
    attrs = Var((dim,), "1", meaning, flags=flags).attrs
    return xr.DataArray(np.arange(len(flags)), dims=dim, attrs=attrs)
