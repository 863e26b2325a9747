"""How near a model comes to predictors of restricted context, over training: yuksel2026 Fig. 3."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float, Int
from scipy.special import entr, log_softmax

from mechicl.analyses.evaluation import predict_steps, reference_axis, spread_steps
from mechicl.analyses.heads import NONFINITE, nonfinite
from mechicl.analyses.probe import Against, Forward, probe, undefined_codes
from mechicl.analyses.stages import dip_or_fall
from mechicl.schema import Var
from mechicl.theory import divergence, markov_chain

CHAIN = {
    "lag_weights": Var(("block", "lag"), "1", "weight alpha of a lag in a block", 0, 1),
    "features": Var(("block", "next_state", "state"), "1", "feature matrices A*, tau times logits"),
    "temperature": Var((), "1", "temperature of the softmax, tau", 0),
}
"""Constants of the Markov chain, which no other task has."""

NONFINITE_PREDICTIONS = "nonfinite_predictions"

Direction = Literal["reference_to_model", "model_to_reference"]
Laws = Mapping[str, Float[np.ndarray, "*seed batch query_pos d_vocab"]]
"""Log-probabilities by name: of one predictor for all seeds, or one for each."""

_MODEL = ("seed", "step")
_AGAINST = (*_MODEL, "reference")
_RUN = ("seed", "reference")
_AT_ONCE = 1024  # prompts: laws of all seeds on more of them take a gigabyte


@probe(
    needs=CHAIN,
    gives={
        "reference": Var(("reference",), "1", "divergence, reference and model in its order"),
        "kl": Var(_AGAINST, "nat", "mean divergence", 0),
        "kl_error": Var(_AGAINST, "nat", "standard error of kl, over prompts", 0),
        "n_infinite": Var(_AGAINST, "1", "predictions of infinite divergence, not averaged", 0),
        "loss": Var(_MODEL, "nat", "cross-entropy of the model on the same prompts", 0),
        "loss_error": Var(_MODEL, "nat", "standard error of loss", 0),
        "excess": Var(_MODEL, "nat", "loss less the entropy floor, on the same prompts"),
        "excess_error": Var(_MODEL, "nat", "standard error of excess", 0),
        "entropy_floor": Var((), "nat", "mean entropy of the generator", 0),
        "lowest": Var(_RUN, "step", "step of the least kl", 0),
        "dip": Var(_RUN, "step", "step of the least kl, where it rises again", 0),
        "fall": Var(_RUN, "step", "step at which half of the fall is made, where it does not", 0),
    },
    undefined=(NONFINITE, NONFINITE_PREDICTIONS, "no_model_of_this_seed", "infinite_everywhere"),
    headline=("loss", "excess"),
    references=("yuksel2026 section 2.2, Figs. 3 and 5",),
    forward=True,
    comparative=True,
)
def context_kl(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    direction: Direction = "reference_to_model",
    conditional: tuple[Annotated[int, pydantic.Field(ge=0)], ...] = (),
    dip_rise: Annotated[float, pydantic.Field(gt=0)] = 0.1,
    least_fall: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.5,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 1000,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 100,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Measure the divergence between a model and predictors that see a part of the context.

    KL(p ‖ q) = Σ_y p(y) log(p(y)/q(y)) of the law of the next token, in nat, averaged over the
    predicted positions of a prompt and over a fixed set of prompts; models' logits are normalised
    in float64. The axis `reference`, numbers that `mechicl.schema.flag_names` reads, says what is
    compared in which direction:

    - `KL(blocks_j||model)`: the generator with the terms of blocks 1 to j alone;
    - `KL(generator||model)`: the chain itself;
    - `KL(trained:NAME||model)`: the run NAME of `against`, at its last step, the model of the same
      seed label: such a run is trained on the same data, with a `context` of its own;
    - `KL(conditional_c||model)`: the exact law given the last c tokens, for c in `conditional`.

    Of each seed at each step:

    - `kl` (seed, step, reference), from 0, and `kl_error`, its standard error over prompts.
      Predictions of infinite divergence, where the first law has mass and the second none, are not
      averaged; `n_infinite` counts them.
    - `loss` (seed, step), cross-entropy, and `excess` = loss − `entropy_floor`, the mean entropy of
      the generator on the same prompts; `excess` is KL(generator ‖ model) but for the sampling of
      targets, and may be below 0 by that. `loss_error` and `excess_error` are standard errors.

    Of each seed and reference, in steps:

    - `lowest`: the step of the least `kl`, which is the last one where the curve still falls.
    - `dip`: the same, where the curve rises again by more than `dip_rise` of its fall, both in
      logarithms: the model has come near this reference, and has left it.
    - `fall`: where it does not rise again, the first step at which half of the fall is made.

    NaN for what there is not: see `mechicl.analyses.stages.dip_or_fall`. A curve that is undefined
    at a step has none of them.

    When it misleads: a reference with blocks dropped is not the best that its tokens allow, so that
    no model of that context comes to 0; `conditional` and trained runs are. All references share
    what the first block says, so that all curves fall with it, and it makes most of `fall`: what
    tells them apart is the bottom, and where it is. Steps are some that were evaluated, `n_steps`
    of them. All steps share the prompts: differences along a run are surer than `kl_error` says.

    Undefined: weights that are not finite; predictions of the model that are not finite; a run of
    `against` that has no finite model of this seed; divergences that are infinite on all prompts.

    Parameters
    ----------
    direction
        `reference_to_model` is KL(reference ‖ model), what the model loses where the reference
        draws the tokens; `model_to_reference` the other.
    conditional
        For each c, the exact law given the last c tokens; for small chains, d^(w+1) at most 2²⁴,
        unless c is w or more.
    dip_rise
        Least rise after the minimum, as a part of the fall before it, both in logarithms.
    least_fall
        Least fall that is one, as a part of the height that it starts from.
    n_prompts
        Size of the evaluation set.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first), first
        and last in; 1 takes the last.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    yuksel2026, section 2.2 and Figs. 1, 3, 5 to 9: KL(reference ‖ model) of dropped blocks and of
    trained models.
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))

    def laws(inputs: Int[np.ndarray, "batch pos"]) -> Laws:
        return {
            **in_order(forward.references(inputs)),
            **{
                f"trained:{name}": _of_seeds(run, chosen["seed"].values, inputs)
                for name, run in forward.against.items()
            },
            **{f"conditional_{c}": _conditional(chosen, inputs, c) for c in conditional},
        }

    measured = divergences(
        chosen,
        forward,
        laws,
        direction=direction,
        n_prompts=n_prompts,
        evaluation_seed=evaluation_seed,
    )
    steps, absent = measured["step"].values, measured["kl"].isnull()
    uncounted = measured["n_infinite"].isnull()
    curves = measured["kl"].fillna(np.inf)
    lowest = measured["step"].astype(float).isel(step=curves.argmin("step")).drop_vars("step")
    places = np.apply_along_axis(
        lambda curve: dip_or_fall(steps, curve, dip_rise=dip_rise, least_fall=least_fall),
        1,
        measured["kl"].transpose(*_AGAINST).values,
    )
    return measured.assign(
        lowest=lowest.where(~absent.any("step")),
        dip=(_RUN, places[:, 0]),
        fall=(_RUN, places[:, 1]),
        undefined=undefined_codes(
            {
                NONFINITE: nonfinite(chosen),
                NONFINITE_PREDICTIONS: measured["loss"].isnull(),
                "no_model_of_this_seed": uncounted.any("reference"),
                "infinite_everywhere": absent.any("reference"),
            }
        ),
    )


def divergences(
    chosen: xr.Dataset,
    forward: Forward,
    laws: Callable[[Int[np.ndarray, "batch pos"]], Laws],
    *,
    n_prompts: int,
    evaluation_seed: int,
    direction: Direction = "reference_to_model",
) -> xr.Dataset:
    """Measure the divergence of every model from every reference, on the same prompts.

    Parameters
    ----------
    chosen
        All parameters at the steps wanted, in memory.
    laws
        `inputs -> {name: log-probabilities}`, the `generator` among them; NaN for a seed is no law.
    n_prompts, evaluation_seed, direction
        As `context_kl` has them.

    Returns
    -------
    xr.Dataset
        `kl`, `kl_error` and `n_infinite` (seed, step, reference), `loss`, `excess` and their errors
        (seed, step), and `entropy_floor`, as `context_kl` has them. NaN where predictions are not
        finite; `kl` and its error also where fewer than two prompts have a finite divergence.
    """
    moments, infinite = _FiniteMoments(), np.array(0.0)
    names: list[str] = []
    floor = 0.0
    for start in range(0, n_prompts, _AT_ONCE):
        size, part = min(_AT_ONCE, n_prompts - start), start // _AT_ONCE
        inputs, targets = forward.prompts(size, evaluation_seed, part=part)
        references = laws(inputs)
        names = list(references)
        entropy = entr(np.exp(references["generator"])).sum(-1).mean(-1)
        floor += float(entropy.sum()) / n_prompts
        shape = (chosen.sizes["seed"], chosen.sizes["step"], len(names) + 2)
        values, counts = np.full((*shape, size), np.nan), np.full(shape, np.nan)
        for step, predicted in enumerate(predict_steps(chosen, forward, inputs)):
            for seed, logits in enumerate(predicted):
                law = normalised(logits)
                if np.isfinite(law).all():
                    loss = -np.take_along_axis(law, targets[..., None], -1).mean((-2, -1))
                    values[seed, step, -2:] = loss, loss - entropy
                    counts[seed, step, -2:] = 0
                    for number, each in enumerate(references.values()):
                        own = each if each.ndim == law.ndim else each[seed]
                        found = divergence.finite_mean(_kl(own, law, direction), axis=-1)
                        values[seed, step, number] = found.mean
                        # One law that is none leaves nothing to be averaged.
                        none = found.n_undefined.any()
                        counts[seed, step, number] = np.nan if none else found.n_infinite.sum()
        moments.add(values)
        infinite = infinite + counts
    mean, error = (
        np.where(np.isnan(infinite), np.nan, each) for each in (moments.mean, moments.error)
    )
    return xr.Dataset(
        {
            "kl": (_AGAINST, mean[..., :-2]),
            "kl_error": (_AGAINST, error[..., :-2]),
            "n_infinite": (_AGAINST, infinite[..., :-2]),
            "loss": (_MODEL, mean[..., -2]),
            "loss_error": (_MODEL, error[..., -2]),
            "excess": (_MODEL, mean[..., -1]),
            "excess_error": (_MODEL, error[..., -1]),
            "entropy_floor": ((), floor),
        },
        coords={dim: chosen[dim] for dim in _MODEL}
        | {"reference": reference_axis(arrow(name, direction) for name in names)},
    )


def in_order(
    references: Mapping[str, Float[np.ndarray, "batch query_pos d_vocab"]],
) -> dict[str, Float[np.ndarray, "batch query_pos d_vocab"]]:
    """Return the references of the chain from the first block to all of them, the generator."""
    rest = {name: law for name, law in references.items() if name != "generator"}
    return {**rest, "generator": references["generator"]}


def arrow(name: str, direction: Direction) -> str:
    """Return what is called a divergence between a reference and the model, without blanks."""
    pair = (name, "model") if direction == "reference_to_model" else ("model", name)
    return "KL({}||{})".format(*pair)


def normalised(
    logits: Float[np.ndarray, "*batch d_vocab"],
) -> Float[np.ndarray, "*batch d_vocab"]:
    """Return log-probabilities in float64, NaN in a row that is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        return log_softmax(np.asarray(logits, float), axis=-1)


def _kl(
    reference: Float[np.ndarray, "batch query_pos d_vocab"],
    model: Float[np.ndarray, "batch query_pos d_vocab"],
    direction: Direction,
) -> Float[np.ndarray, "batch query_pos"]:
    if direction == "reference_to_model":
        return divergence.kl(reference, model)
    return divergence.kl(model, reference)


def _of_seeds(
    run: Against, seeds: Int[np.ndarray, " seed"], inputs: Int[np.ndarray, "batch pos"]
) -> Float[np.ndarray, "seed batch query_pos d_vocab"]:
    """Return the laws of another run's models of these seeds; NaN for those that it has not."""
    own = normalised(run.predict(inputs))
    found = np.full((len(seeds), *own.shape[1:]), np.nan)
    known = run.seeds.tolist()
    for number, seed in enumerate(seeds.tolist()):
        if seed in known:
            found[number] = own[known.index(seed)]
    return found


def _conditional(
    chosen: xr.Dataset, inputs: Int[np.ndarray, "batch pos"], c: int
) -> Float[np.ndarray, "batch query_pos d_vocab"]:
    """Return the exact law given the last c tokens, of the chain that the run's constants state."""
    weights = chosen["lag_weights"].transpose("block", "lag").values
    features = chosen["features"].transpose("block", "next_state", "state").values
    spans = [np.flatnonzero(row).tolist() for row in weights]
    shares = [row[lags].tolist() for row, lags in zip(weights, spans, strict=True)]
    logits = features / float(chosen["temperature"])
    return markov_chain.log_conditional(inputs, c, logits, spans, shares)


class _FiniteMoments:
    """Mean and standard error of the finite ones of values (..., batch) that come in parts."""

    def __init__(self) -> None:
        self._n: np.ndarray = np.array(0)
        self._mean: np.ndarray = np.array(0.0)
        self._squares: np.ndarray = np.array(0.0)

    def add(self, values: Float[np.ndarray, "*models batch"]) -> None:
        """Take in one part."""
        finite = np.isfinite(values)
        n = finite.sum(-1)
        mean = np.where(finite, values, 0.0).sum(-1) / np.maximum(n, 1)
        squares = np.where(finite, values - mean[..., None], 0.0) ** 2
        # Chan's update, as in `evaluation.Moments`, with as many values as are finite.
        total, shift = self._n + n, mean - self._mean
        share = n / np.maximum(total, 1)
        self._squares = self._squares + squares.sum(-1) + shift**2 * self._n * share
        self._mean = self._mean + shift * share
        self._n = total

    @property
    def mean(self) -> Float[np.ndarray, "*models"]:
        """Mean of the finite values; NaN for fewer than two, which have no error."""
        return np.where(self._n > 1, self._mean, np.nan)

    @property
    def error(self) -> Float[np.ndarray, "*models"]:
        """Standard error of `mean`."""
        n = np.maximum(self._n, 2)
        return np.where(self._n > 1, np.sqrt(self._squares / (n - 1) / n), np.nan)
