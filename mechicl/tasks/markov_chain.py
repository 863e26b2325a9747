"""Sequences of a Markov chain of high order, whose logits add up over lags (yuksel2026)."""

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
import pydantic
from jaxtyping import Float, Int

from mechicl.schema import Var
from mechicl.tasks.base import Prompts, TokenTask, register
from mechicl.theory import features
from mechicl.theory import markov_chain as theory

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST = 2**16  # tokens of a window
_STRONGEST = 1e24  # logits of a feature; float32, in which they are summed, holds 1e38

Lags = tuple[Annotated[int, pydantic.Field(ge=0, lt=_LONGEST)], ...]


@register
class MarkovChain(TokenTask):
    """x_{t+1} ~ softmax((1/τ) Σ_k A*_k Σ_{i ∈ I(k)} α_i x_{t−i}), x one-hot over d states (eq. 1).

    The first w tokens of a sequence are uniform and not predicted, the T after them are. A prompt
    is the w + T − 1 tokens that a model reads; its targets are the T tokens that follow positions
    w − 1 to w + T − 2, and its loss is their mean cross-entropy in nat.

    A*_k = importance^(h−k) · base_scale · R_k, with R_k uniform over orthogonal matrices, drawn
    from `features_seed`: the same for all seeds of a run. The published code sums over a block
    where the paper averages, so its scale of 1 a token is a base_scale of |I(k)|.

    Attributes
    ----------
    d
        States.
    blocks
        I(1), I(2), ...: the lags that each feature matrix reads, 0 the most recent token. As many
        numbers as there are blocks stand for contiguous blocks of these lengths, from lag 0. A
        window has 65,536 tokens at most, and d² times its tokens, or blocks, is 2²⁶ at most.
    weights
        α_i of every block, in the order of its lags, summing to 1; None for equal ones.
    n_predictions
        T.
    importance, base_scale
        m and b₀; norms of the features fall as m^(h−k) from the first block to the last. The
        strongest may make 1e24 logits.
    temperature
        τ, of the chain's softmax, and of the models that are trained on it.
    orthogonal_features
        Whether the R_k are made orthogonal to each other as well (Gram-Schmidt in ⟨A, B⟩ =
        tr AᵀB, norms √d kept), as the theorems assume and large d gives nearly by itself.
    features_seed
        Which features are drawn.
    """

    name: Literal["markov_chain"] = "markov_chain"  # pyright: ignore[reportIncompatibleVariableOverride]
    d: Annotated[int, pydantic.Field(ge=2)] = 20
    blocks: tuple[Lags, ...] = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    weights: tuple[tuple[Annotated[float, pydantic.Field(gt=0)], ...], ...] | None = None
    n_predictions: Annotated[int, pydantic.Field(ge=1)] = 20
    importance: Annotated[float, pydantic.Field(gt=0)] = 1.7
    base_scale: Annotated[float, pydantic.Field(gt=0)] = 4.0
    orthogonal_features: bool = False
    features_seed: Annotated[int, pydantic.Field(ge=0)] = 0

    @pydantic.field_validator("blocks", mode="before")
    @classmethod
    def _lengths_stand_for_blocks(cls, given: object) -> object:
        """Take (4, 4, 4) for contiguous blocks of these lengths."""
        if not isinstance(given, (list, tuple)) or not given:
            return given
        if not all(type(length) is int and length > 0 for length in given):  # True is an int too
            return given
        ends = list(accumulate(given))
        if ends[-1] > _LONGEST:
            raise ValueError(f"blocks reach {ends[-1]} tokens back; the most is {_LONGEST}")
        return tuple(
            tuple(range(end - length, end)) for length, end in zip(given, ends, strict=True)
        )

    @pydantic.model_validator(mode="after")
    def _blocks_and_weights_fit(self) -> Self:
        if not self.blocks:
            raise ValueError("blocks needs one set of lags a feature matrix, one at least")
        for number, lags in enumerate(self.blocks):
            if not lags:
                raise ValueError(f"blocks[{number}] is empty; a block has one lag at least")
            if len(set(lags)) != len(lags):
                raise ValueError(f"blocks[{number}] = {lags} repeats a lag")
        size = self.d**2 * max(len(self.blocks), self.order)
        if size > theory.LARGEST_CHAIN:
            raise ValueError(
                f"d = {self.d} states, {len(self.blocks)} blocks and a window of {self.order} "
                f"tokens make {size:.2g} numbers, d² for each block or token; the most is "
                f"{theory.LARGEST_CHAIN}: take fewer states, or a shorter window"
            )
        strongest = np.log(self.base_scale) - np.log(self.temperature)
        strongest += max((len(self.blocks) - 1) * np.log(self.importance), 0.0)
        if strongest > np.log(_STRONGEST):
            raise ValueError(
                f"base_scale {self.base_scale:g}, importance {self.importance:g} and temperature "
                f"{self.temperature:g} make features of 10^{strongest / np.log(10):.0f} logits, "
                f"which float32 does not hold; the most is {_STRONGEST:g}"
            )
        if self.orthogonal_features and len(self.blocks) > self.d**2:
            raise ValueError(
                f"there are no {len(self.blocks)} orthogonal features of {self.d}×{self.d}"
            )
        if self.weights is None:
            return self
        if [len(each) for each in self.weights] != [len(lags) for lags in self.blocks]:
            raise ValueError(
                f"weights has {[len(each) for each in self.weights]} numbers a block, and blocks "
                f"{[len(lags) for lags in self.blocks]} lags"
            )
        for number, each in enumerate(self.weights):
            if not np.isclose(sum(each), 1.0, rtol=0, atol=1e-9):
                raise ValueError(f"weights[{number}] sums to {sum(each):.7g}; it has to be 1")
        return self

    @property
    def d_vocab(self) -> int:
        """The states: d."""
        return self.d

    @property
    def order(self) -> int:
        """W = 1 + the largest lag: how many tokens the next one depends on."""
        return theory.window(self.blocks)

    @property
    def n_positions(self) -> int:
        """W + T − 1: all tokens but the last, which is a target alone."""
        return self.order + self.n_predictions - 1

    @property
    def target_sizes(self) -> dict[str, int]:
        """One token for each predicted position."""
        return {"query_pos": self.n_predictions}

    @property
    def prediction_sizes(self) -> dict[str, int]:
        """Logits for each predicted position."""
        return {"query_pos": self.n_predictions, "d_vocab": self.d}

    @property
    def n_normals(self) -> int:
        """One a token."""
        return self.order + self.n_predictions

    @cached_property
    def features(self) -> Float[np.ndarray, "block next_state state"]:
        """A*_k, first block first."""
        drawn = features.haar_features(
            len(self.blocks),
            self.d,
            ratio=self.importance,
            base=self.base_scale,
            rng=np.random.default_rng(self.features_seed),
        )
        return features.orthogonalised(drawn) if self.orthogonal_features else drawn

    @cached_property
    def lag_weights(self) -> Float[np.ndarray, "block lag"]:
        """α_i where a block reads lag i, 0 elsewhere."""
        found = np.zeros((len(self.blocks), self.order))
        for number, lags in enumerate(self.blocks):
            found[number, list(lags)] = self.weights[number] if self.weights else 1 / len(lags)
        return found

    def constants(self) -> dict[str, tuple[Var, float | np.ndarray]]:
        """Return d, w, T, τ, the features and the weights of lags."""
        matrix = ("block", "next_state", "state")
        return {
            "n_states": (Var((), "1", "states of the chain, d", 2), self.d),
            "order": (Var((), "token", "tokens that the next one depends on, w", 1), self.order),
            "n_predictions": (
                Var((), "token", "predicted tokens of a sequence, T", 1),
                self.n_predictions,
            ),
            "temperature": (Var((), "1", "temperature of the softmax, tau", 0), self.temperature),
            "features": (
                Var(matrix, "1", "feature matrices A*, tau times logits"),
                self.features,
            ),
            "lag_weights": (
                Var(("block", "lag"), "1", "weight alpha of a lag in a block", 0, 1),
                self.lag_weights,
            ),
        }

    def examples(
        self, normals: "Float[Tensor, '*models batch n_normals']"
    ) -> "Int[Tensor, '*models batch n_normals']":
        """Sample whole sequences, all at once, by inverting the law of one token after another."""
        import torch

        w, d = self.order, self.d
        uniform = torch.special.ndtr(normals.reshape(-1, self.n_normals)).T.contiguous()
        tokens = torch.empty(uniform.T.shape, dtype=torch.int64)
        tokens[:, :w] = (uniform[:w].T * d).long().clamp(max=d - 1)
        per_lag = theory.per_lag_features(self.features, self.blocks, self.weights)
        # Rows for a token at each place of the window, the oldest first.
        table = torch.from_numpy(per_lag[::-1].swapaxes(1, 2).reshape(w * d, d) / self.temperature)
        table, offsets = table.float(), d * torch.arange(w)
        for t in range(self.n_predictions):
            logits = torch.nn.functional.embedding_bag(
                tokens[:, t : t + w] + offsets, table, mode="sum"
            )
            cumulative = logits.softmax(-1).cumsum(-1)
            drawn = torch.searchsorted(cumulative, uniform[w + t, :, None], right=True)
            tokens[:, w + t] = drawn[:, 0].clamp(max=d - 1)  # where rounding leaves the sum below 1
        return tokens.reshape(normals.shape)

    def prompts(self, examples: "Int[Tensor, '*models batch n_normals']") -> Prompts:
        """Cut sequences into what is read and what is predicted."""
        return Prompts(examples[..., :-1], examples[..., self.order :])

    def loss(
        self,
        predictions: "Float[Tensor, '*batch query_pos d_vocab']",
        targets: "Int[Tensor, '*batch query_pos']",
    ) -> "Float[Tensor, '*batch']":
        """Cross-entropy in nat, averaged over the predicted positions."""
        import torch

        states = torch.arange(self.d, device=predictions.device)
        # A comparison and a sum, which compile into one loop, unlike the gradient of a gather.
        picked = torch.where(targets[..., None] == states, predictions, 0.0).sum(-1)
        return (predictions.logsumexp(-1) - picked).mean(-1)

    def references(
        self, inputs: Int[np.ndarray, "*batch pos"]
    ) -> Mapping[str, Float[np.ndarray, "*batch query_pos d_vocab"]]:
        """Predict as the chain itself does, with all of its terms or the first few, in nat.

        - `generator`: log-probabilities of the next token. Their mean entropy is the least loss.
        - `blocks_1`, `blocks_2`, ...: the same with the terms of later blocks dropped. It is not
          the best that tokens of these blocks allow: `exact_conditional` is, of small chains.
        """
        logits = {
            f"blocks_{n}": theory.log_probabilities(
                inputs, self.features / self.temperature, self.blocks, self.weights, n_blocks=n
            )
            for n in range(1, len(self.blocks) + 1)
        }
        return {"generator": logits.popitem()[1], **logits}

    def exact_conditional(
        self, inputs: Int[np.ndarray, "*batch pos"], c: int
    ) -> Float[np.ndarray, "*batch query_pos d_vocab"]:
        """Return log-probabilities given the last `c` tokens alone, exact, in nat.

        Raises InputError for chains with too many windows; see `theory.markov_chain`.
        """
        return theory.log_conditional(
            inputs, c, self.features / self.temperature, self.blocks, self.weights
        )

    def entropy_floor(self, inputs: Int[np.ndarray, "*batch pos"]) -> float:
        """Return the mean entropy of the generator on these inputs, in nat: the least loss."""
        return theory.mean_entropy(self.references(inputs)["generator"])
