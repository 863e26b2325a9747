"""Whether predictions follow a workspace into another context: the function vectors of raj2026."""

from typing import TYPE_CHECKING, Annotated

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float

from mechicl.analyses import transplants
from mechicl.analyses.evaluation import spread_steps, squared_error
from mechicl.analyses.heads import NONFINITE, nonfinite
from mechicl.analyses.pooled import POOLED
from mechicl.analyses.probe import Forward, probe, undefined_codes, verdict
from mechicl.analyses.transplants import NONFINITE_PREDICTIONS, QUERIES, mean_and_error
from mechicl.schema import Var

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import HookedTransformer

_MODEL = ("seed", "step")
_LAYER = (*_MODEL, "layer")
_FOLLOWS = ("follows", "follows_error")


def has_workspace(trajectory: xr.Dataset) -> str | None:
    """Apply where the context reaches the queries through a workspace."""
    if not bool(trajectory["feedforward"]):
        return "it transplants the workspace, and a model without MLPs has none"
    return None


@probe(
    needs=POOLED | QUERIES,
    gives={
        "follows": Var(
            _LAYER, "1", "how far predictions move to the donor's: 0 not, 1 all the way"
        ),
        "follows_error": Var(_LAYER, "1", "standard error of follows", 0),
        "distance_to_donor": Var(_LAYER, "1", "mean squared distance from the donor's", 0),
        "distance_error": Var(_LAYER, "1", "standard error of distance_to_donor", 0),
        "donor_loss": Var(_LAYER, "1", "mean squared error for the donor's coefficients", 0),
        "donor_loss_error": Var(_LAYER, "1", "standard error of donor_loss", 0),
        "own_loss": Var(_LAYER, "1", "mean squared error for the context's own coefficients", 0),
        "own_loss_error": Var(_LAYER, "1", "standard error of own_loss", 0),
        "self_change": Var(_LAYER, "1", "largest change by a transplant of the own workspace", 0),
        "last_follows": Var(_MODEL, "1", "follows after the last layer"),
        "separation": Var(_MODEL, "1", "mean squared distance of own and donor's predictions", 0),
        "clean_loss": Var(_MODEL, "1", "own_loss without a transplant", 0),
        "clean_error": Var(_MODEL, "1", "standard error of clean_loss", 0),
        "foreign_loss": Var(_MODEL, "1", "donor_loss without a transplant", 0),
        "foreign_error": Var(_MODEL, "1", "standard error of foreign_loss", 0),
        "gain": Var(_MODEL, "1", "how far the last donor_loss is below the middle of those two"),
        "gain_error": Var(_MODEL, "1", "paired standard error of gain", 0),
    },
    statement="with the workspace of the last layer a context predicts as its donor",
    undefined=(NONFINITE, NONFINITE_PREDICTIONS, "donor_predicts_the_same"),
    headline=("clean_loss", "foreign_loss", "last_follows"),
    applies=has_workspace,
    references=("raj2026 section II, below (1)",),
    forward=True,
)
def function_vector(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 512,
    n_queries: Annotated[int, pydantic.Field(ge=1)] = 8,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 5,
    margin: Annotated[float, pydantic.Field(ge=0)] = 3.0,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Measure how far predictions follow the workspace of another context, layer by layer.

    Pairs of independent contexts are drawn, each with its θ. In the run of the first, which has
    queries x of its own, the workspace p after layer ℓ (eq. 6) is replaced by that of the second,
    the donor, and the later layers go on from there: what they measure, they measure of the first.
    ŷ_own and ŷ_donor are predictions for the same queries without a transplant, of the one context
    and of the other; ŷ_ℓ those with it.

    - `follows` (seed, step, layer) = Σ (ŷ_ℓ − ŷ_own)(ŷ_donor − ŷ_own) / Σ (ŷ_donor − ŷ_own)², over
      pairs and queries; `follows_error` its standard error over pairs, to first order. It is
      exactly 1 after the last layer, for a query knows the context by p alone.
    - `distance_to_donor` = mean of (ŷ_ℓ − ŷ_donor)², `distance_error` its error; 0 after the last.
    - `donor_loss`, `own_loss` = mean of (θᵀx − ŷ_ℓ)² with the θ of the donor, and with that of
      the context itself; `donor_loss_error` and `own_loss_error`.
    - `self_change` = largest |ŷ − ŷ_own| where p after layer ℓ is replaced by itself: exactly 0.
    - `clean_loss` and `foreign_loss` (seed, step) = mean of (θᵀx − ŷ_own)² with the own θ and with
      the donor's, `clean_error` and `foreign_error` theirs.
    - `separation` (seed, step) = mean of (ŷ_donor − ŷ_own)²; `last_follows` = `follows` after the
      last layer.
    - `gain` = (`clean_loss` + `foreign_loss`)/2 − `donor_loss` after the last layer, `gain_error`
      its error, paired.
    - `holds`: `gain` is above `margin` times `gain_error`: there the donor's regression is done
      nearer as well as the own one is without a transplant, than as badly as another's is.

    All but `follows` and `last_follows` are in units of y, squared but for `self_change`.

    When it misleads: that the last workspace carries all there is follows from the architecture,
    and `follows` is 1 there for untrained models too; `holds` asks whether it carries something of
    use. Little following after early layers is no lack of a function vector: later layers measure
    the context that they are in. In a tree prior a donor may be of the same leaf.

    Undefined: weights that are not finite; predictions or losses that overflow; `follows` where own
    and donor's predictions are the same for all pairs.

    Parameters
    ----------
    n_prompts
        Number of pairs.
    n_queries
        At most so many of a prompt's queries are answered.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first), first
        and last in; 1 takes the last.
    margin
        How many standard errors `gain` has to have.
    evaluation_seed
        Seed of the pairs.

    References
    ----------
    raj2026, section II, the definition of a function vector below (1).
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    n_layers = trajectory.sizes["layer"]
    cut = transplants.parts(n_prompts, forward, evaluation_seed)
    pairs = _Pairs(forward, evaluation_seed, cut, n_layers, n_queries)
    found = transplants.steps(chosen, forward, pairs.measure)
    data = {name: (_LAYER if value.ndim == 3 else _MODEL, value) for name, value in found.items()}
    result = xr.Dataset(data, coords={dim: chosen[dim] for dim in _MODEL})
    result["last_follows"] = result["follows"].isel(layer=-1)
    rest = tuple(str(name) for name in result if name not in (*_FOLLOWS, "last_follows"))
    missing = transplants.any_missing(result, rest)
    condition = result["gain"] > margin * result["gain_error"]
    return result.assign(
        holds=verdict(condition, missing),
        undefined=undefined_codes(
            {
                NONFINITE: nonfinite(chosen),
                NONFINITE_PREDICTIONS: missing,
                "donor_predicts_the_same": transplants.any_missing(result, _FOLLOWS),
            }
        ),
    )


class _Pairs:
    """Pairs of contexts, drawn anew for each step, and what transplants between them do."""

    def __init__(
        self,
        forward: Forward,
        seed: int,
        cut: list[tuple[int, int]],
        n_layers: int,
        n_queries: int,
    ) -> None:
        self._forward, self._seed, self._cut = forward, seed, cut
        self._n_layers, self._n_queries = n_layers, n_queries
        self._names = [f"blocks.{layer}.hook_workspace" for layer in range(n_layers)]

    def measure(self, models: transplants.Models) -> dict[str, np.ndarray]:
        """Return what one step gives: (seed, layer) and (seed)."""
        shape = (models.n_seeds, sum(size for size, _ in self._cut))
        layered, alone = (shape[0], self._n_layers, shape[1]), shape
        over = {
            name: np.full(layered, np.nan)
            for name in ("moved", "distance", "donor", "own", "change")
        }
        once = {name: np.full(alone, np.nan) for name in ("separation", "clean", "foreign")}
        done = 0
        for size, part in self._cut:
            prompts, swapped, own, other = self._drawn(size, part)
            read = models.reads(prompts), models.reads(swapped)
            at = slice(done, done + size)
            done += size

            def one(
                seed: int,
                model: "HookedTransformer",
                read: "tuple[Tensor, Tensor]" = read,
                own: np.ndarray = own,
                other: np.ndarray = other,
                at: slice = at,
            ) -> None:
                with transplants.few_queries(model, own.shape[1]):
                    plain, donor, patched, itself = self._runs(model, *read)
                once["separation"][seed, at] = squared_error(donor, plain)
                once["clean"][seed, at] = squared_error(plain, own)
                once["foreign"][seed, at] = squared_error(plain, other)
                over["distance"][seed, :, at] = squared_error(patched, donor)
                over["donor"][seed, :, at] = squared_error(patched, other)
                over["own"][seed, :, at] = squared_error(patched, own)
                with np.errstate(over="ignore", invalid="ignore"):
                    along = (patched - plain) * (donor - plain)
                    over["moved"][seed, :, at] = along.mean(-1)
                    over["change"][seed, :, at] = np.abs(itself - plain).max(-1)

            models.each(one)
        with np.errstate(over="ignore", invalid="ignore"):
            gain = (once["clean"] + once["foreign"]) / 2 - over["donor"][:, -1]
        found: dict[str, np.ndarray] = {"self_change": over["change"].max(-1)}
        for name, error, values in (
            ("distance_to_donor", "distance_error", over["distance"]),
            ("donor_loss", "donor_loss_error", over["donor"]),
            ("own_loss", "own_loss_error", over["own"]),
            ("clean_loss", "clean_error", once["clean"]),
            ("foreign_loss", "foreign_error", once["foreign"]),
            ("gain", "gain_error", gain),
        ):
            found[name], found[error] = mean_and_error(values)
        found["separation"], _ = mean_and_error(once["separation"])
        found["follows"], found["follows_error"] = _ratio(over["moved"], once["separation"])
        return found

    def _drawn(
        self, size: int, part: int
    ) -> tuple[
        Float[np.ndarray, "pair pos d_model"],
        Float[np.ndarray, "pair pos d_model"],
        Float[np.ndarray, "pair query"],
        Float[np.ndarray, "pair query"],
    ]:
        """Return prompts, the same with the donor's context, and what either θ asks of them."""
        some = transplants.sample(self._forward, 2 * size, self._seed, part)
        inputs, theta = some["inputs"].values, some["theta"].values.astype(float)
        n_context = inputs.shape[1] - some.sizes["query"]
        queries = inputs[:size, n_context:]
        swapped = np.concatenate([inputs[size:, :n_context], queries], 1)
        asked = queries[:, : self._n_queries, :-1].astype(float)
        own, other = (np.einsum("pqk,pk->pq", asked, each) for each in (theta[:size], theta[size:]))
        return inputs[:size], swapped, own, other

    def _runs(
        self, model: "HookedTransformer", inputs: "Tensor", swapped: "Tensor"
    ) -> tuple[
        Float[np.ndarray, "pair query"],
        Float[np.ndarray, "pair query"],
        Float[np.ndarray, "layer pair query"],
        Float[np.ndarray, "layer pair query"],
    ]:
        """Return predictions of the own context, the donor's, and with either workspace put in.

        Each run has the same pairs in the same places, so that what is the same is so to the bit.
        """
        from mechicl.models.interventions import Patch, record, run_patched

        def under(name: str, value: "Tensor") -> np.ndarray:
            patch = Patch(name, value)
            return run_patched(model, inputs, patch, unchanged="ignore").numpy().astype(float)

        own, donor = (record(model, each, self._names) for each in (inputs, swapped))
        plain, given = (model(each).numpy().astype(float) for each in (inputs, swapped))
        patched, itself = (
            np.stack([under(name, source[name]) for name in self._names]) for source in (donor, own)
        )
        return plain, given, patched, itself


def _ratio(
    along: Float[np.ndarray, "seed layer pair"], whole: Float[np.ndarray, "seed pair"]
) -> tuple[Float[np.ndarray, "seed layer"], Float[np.ndarray, "seed layer"]]:
    """Return the ratio of two sums over pairs and its standard error; NaN where the second is 0."""
    total = whole.mean(-1)[:, None]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratio = np.where(total > 0, along.mean(-1) / total, np.nan)
        # To first order the ratio moves with a pair by what it leaves of the first, over the mean.
        _, error = mean_and_error((along - ratio[..., None] * whole[:, None]) / total[..., None])
    return ratio, error
