"""What models of token sequences share: context windows, one-hot tokens, patterns by lag."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated

import pydantic

from mechicl.errors import InputError
from mechicl.models.base import Model, of_kind
from mechicl.tasks import Task, TokenTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Bool, Float, Int
    from torch import Tensor


class TokenModel(Model, ABC):
    """A causal model of tokens: logits of the next one at each position that the loss reads.

    Attributes
    ----------
    context
        c: the model reads the last c tokens alone, as a window with positions of its own, and is
        asked at the last of them. None: it reads the whole prompt, and is asked at every position
        that is followed by a target.
    """

    input_kind = "tokens"
    context: Annotated[int, pydantic.Field(ge=1)] | None = None

    def refusal(self, task: Task) -> str | None:
        """Refuse a context that reaches before the first predicted position's first token."""
        reason = super().refusal(task)
        if reason is not None or self.context is None:
            return reason
        seen = task.n_positions - task.target_sizes["query_pos"] + 1
        if self.context > seen:
            return (
                f"context {self.context} is longer than the {seen} tokens that come before the "
                f"first target of task {task.name!r}; take {seen} at most, or null"
            )
        return None

    def n_read(self, task: Task) -> int:
        """Return how many positions the model has: c, or those of a prompt."""
        return task.n_positions if self.context is None else self.context

    def n_scored(self, task: Task) -> int:
        """Return at how many of its last positions the model is asked."""
        return task.target_sizes["query_pos"] if self.context is None else 1

    def n_windows(self, task: Task) -> int:
        """Return in how many sequences the model reads one prompt: one a target where c is set."""
        return 1 if self.context is None else task.target_sizes["query_pos"]

    def windows(
        self, task: Task, inputs: "Int[Tensor, '*models batch pos']"
    ) -> "Int[Tensor, '*models batch_window read']":
        """Cut prompts into the sequences that the model reads; a prompt's windows are in order.

        `hooked` models read these: of a model without `context` they are the prompts themselves.
        """
        if inputs.shape[-1] != task.n_positions:
            raise InputError(
                f"prompts of task {task.name!r} have {task.n_positions} positions; given "
                f"{inputs.shape[-1]}"
            )
        if self.context is None:
            return inputs
        cut = inputs.unfold(-1, self.context, 1)[..., -self.n_windows(task) :, :]
        return cut.flatten(-3, -2)

    @abstractmethod
    def logits(
        self,
        task: TokenTask,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        tokens: "Int[Tensor, '... sequence read']",
        kept: "Float[Tensor, '... sequence n_kept'] | None" = None,
    ) -> "Float[Tensor, '*models sequence scored d_vocab']":
        """Return the logits at the scored positions of each sequence that `windows` gives."""

    @abstractmethod
    def patterns(
        self,
        task: TokenTask,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        tokens: "Int[Tensor, '... sequence read']",
    ) -> "Float[Tensor, '*models layer head sequence scored read']":
        """Return attention weights of the scored positions of each sequence, by key position."""

    def predict(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        inputs: "Int[Tensor, '... batch pos']",
    ) -> "Float[Tensor, '*models batch query_pos d_vocab']":
        """Return the logits of every target."""
        task = of_kind(self, task, TokenTask)
        logits = self.logits(task, parameters, self.windows(task, inputs))
        return _by_prompt(logits, task, -3)

    def predict_dropped(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        inputs: "Int[Tensor, '... batch pos']",
        kept: "Float[Tensor, '... batch n_dropout']",
    ) -> "Float[Tensor, '*models batch query_pos d_vocab']":
        """Return the logits of every target, with dropout."""
        task = of_kind(self, task, TokenTask)
        sequences = self.windows(task, inputs)
        kept = kept.unflatten(-1, (self.n_windows(task), -1)).flatten(-3, -2)
        return _by_prompt(self.logits(task, parameters, sequences, kept), task, -3)

    def attention(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        inputs: "Int[Tensor, 'batch pos']",
    ) -> "Float[Tensor, '*models layer head batch query_pos lag']":
        """Return attention weights by lag: as many lags as the model has positions."""
        import torch

        task = of_kind(self, task, TokenTask)
        pattern = self.patterns(task, parameters, self.windows(task, inputs))
        n_read, n_scored = self.n_read(task), self.n_scored(task)
        rows = []
        for index in range(n_scored):
            query = n_read - n_scored + index
            backwards = pattern[..., index, : query + 1].flip(-1)
            rows.append(torch.nn.functional.pad(backwards, (0, n_read - query - 1)))
        return _by_prompt(torch.stack(rows, -2), task, -3)


def _by_prompt(values: "Tensor", task: TokenTask, axis: int) -> "Tensor":
    """Give the targets of a prompt one axis, whether they are of one sequence or of windows."""
    n_targets = task.target_sizes["query_pos"]
    shape = (*values.shape[:axis], -1, n_targets, *values.shape[axis + 2 :])
    return values.reshape(shape)


def one_hot(tokens: "Int[Tensor, '*batch']", task: TokenTask) -> "Float[Tensor, '*batch d_vocab']":
    """Return tokens as vectors.

    With vocabularies this small a product with them is faster than looking rows up: its gradient
    is a product too, where that of a look-up adds numbers one by one.
    """
    import torch

    ids = torch.arange(task.d_vocab, device=tokens.device)
    return (tokens[..., None] == ids).to(torch.get_default_dtype())


def causal(n_read: int, n_scored: int) -> "Bool[Tensor, 'scored read']":
    """Return which positions the last `n_scored` of `n_read` may attend to: up to themselves."""
    import torch

    return torch.ones(n_scored, n_read, dtype=torch.bool).tril(n_read - n_scored)


def masked_softmax(
    scores: "Float[Tensor, '*batch scored read']",
) -> "Float[Tensor, '*batch scored read']":
    """Softmax over the positions that each of the last ones may attend to."""
    import torch

    n_scored, n_read = scores.shape[-2:]
    future = ~causal(n_read, n_scored).to(scores.device)
    # A finite number, so that the gradient of a masked score is 0 and not NaN.
    return scores.masked_fill(future, torch.finfo(scores.dtype).min).softmax(-1)
