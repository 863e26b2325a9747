"""What models of token sequences share: context windows, look-ups, patterns by lag."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated

import pydantic

from mechicl.errors import InputError
from mechicl.models.base import Model, of_kind
from mechicl.tasks import Task, TokenTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from jaxtyping import Float, Int
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
        # Of one prompt they are a view, and what it strides over TransformerLens cannot flatten.
        return cut.flatten(-3, -2).contiguous()

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

    def answers(
        self, task: Task, output: "Float[Tensor, '*variants sequence read d_vocab']"
    ) -> "Float[Tensor, '*variants batch query_pos d_vocab']":
        """Return the logits at the scored positions, those of a prompt's windows put together."""
        task = of_kind(self, task, TokenTask)
        return _by_prompt(output[..., -self.n_scored(task) :, :], task, -3)

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


def one_hot(
    tokens: "Int[Tensor, '*batch']", n: int, dtype: "torch.dtype"
) -> "Float[Tensor, '*batch n']":
    """Return tokens as vectors of n entries."""
    import torch

    return (tokens[..., None] == torch.arange(n, device=tokens.device)).to(dtype)


def look_up(
    table: "Float[Tensor, '*models d_vocab head columns']",
    tokens: "Int[Tensor, '... sequence position']",
) -> "Float[Tensor, '*models sequence position head columns']":
    """Return the rows of every token, each model's from its own table."""
    import torch

    if tokens.device.type != "cpu":
        # A GPU adds up the gradient of a look-up in no fixed order, and that of a product in one.
        return by_product(table, tokens)
    models, d = table.shape[:-3], table.shape[-3]
    if models:
        first = d * torch.arange(models.numel())
        tokens = tokens + first.reshape(*models, 1, 1)
    return table.reshape(-1, *table.shape[-2:])[tokens]


def by_product(
    table: "Float[Tensor, '*models d_vocab head columns']",
    tokens: "Int[Tensor, '... sequence position']",
) -> "Float[Tensor, '*models sequence position head columns']":
    """Look rows up as a product with one-hot tokens."""
    vectors = one_hot(tokens, table.shape[-3], table.dtype)
    flat = vectors.flatten(-3, -2) @ table.flatten(-2)
    return flat.reshape(*flat.shape[:-2], *tokens.shape[-2:], *table.shape[-2:])


def unseen(
    n_read: int, n_scored: int, values: "Float[Tensor, '...']"
) -> "Float[Tensor, 'scored read']":
    """Return what hides later positions from the last `n_scored` of `n_read`, added to scores.

    0, or the least number of the type of `values`: finite, so that no gradient of it is NaN.
    """
    import torch

    later = torch.ones(n_scored, n_read, dtype=torch.bool, device=values.device)
    later = later.triu(n_read - n_scored + 1)
    return torch.zeros_like(later, dtype=values.dtype).masked_fill(
        later, torch.finfo(values.dtype).min
    )


def masked_softmax(
    scores: "Float[Tensor, '*batch scored read']",
) -> "Float[Tensor, '*batch scored read']":
    """Softmax over the positions that each of the last ones may attend to."""
    n_scored, n_read = scores.shape[-2:]
    return (scores + unseen(n_read, n_scored, scores)).softmax(-1)
