"""Pooling models that follow the tree and say what they have read, for probes that transplant."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformer_lens import HookedTransformer

from mechicl.analyses import Forward, forward_of
from mechicl.tasks.latent_regression import LatentRegression
from tests.analyses import pooled_toy


class PathReadout(nn.Module):
    """Answers queries with the leaf that the workspace of `pooled_toy.path_reader` spells.

    Entry m of the workspace is the spin m + 1 and noise: its sign is taken for the spin. `b_U` is
    added.
    """

    def __init__(self, task: LatentRegression, b_u: Tensor) -> None:
        super().__init__()
        self.leaves, self.b_u = torch.from_numpy(task.prior.leaves), b_u

    def forward(self, queries: Tensor, workspace: Tensor) -> Tensor:
        """Return the predictions."""
        depth = int(np.log2(len(self.leaves)))
        bits = 2 ** torch.arange(depth - 1, -1, -1)
        leaf = ((workspace[:, :depth] > 0) * bits).sum(-1)
        return torch.einsum("bqk,bk->bq", queries[..., :-1], self.leaves[leaf]) + self.b_u


def reading(task: LatentRegression) -> Forward:
    """Return a Forward of models A whose queries are answered by a `PathReadout`."""
    plain = forward_of(task, pooled_toy.model("A", task.prior.depth))

    def hooked(parameters: Mapping[str, np.ndarray]) -> HookedTransformer:
        model = plain.hooked(parameters)
        model.output = PathReadout(task, torch.from_numpy(np.array(parameters["b_U"])))
        return model

    return replace(plain, hooked=hooked)


def forward64() -> Forward:
    """Return a Forward for `pooled_toy.of_regression` whose hooked models answer."""
    return reading(pooled_toy.contract_task())
