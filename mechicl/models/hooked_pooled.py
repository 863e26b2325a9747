"""Pooling models as HookedTransformers, made from the parameters of a run."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.hook_points import HookPoint

from mechicl.errors import InputError
from mechicl.models.pooled_attention import EPS
from mechicl.tasks import ContinuousTask

if TYPE_CHECKING:
    from mechicl.models.pooled_attention import PooledAttention


class Pooling(nn.Module):
    """⟨(V z) ⊙ (K z)⟩ over the context, with keys that the caller gives.

    `hook_dynamic_key` is K, `hook_token_key` and `hook_token_value` are K z and V z of every token,
    `hook_phi` is φ.
    """

    def __init__(self, w_v: Float[Tensor, "channel d_model"]) -> None:
        super().__init__()
        self.W_V = nn.Parameter(w_v.clone())
        self.hook_dynamic_key, self.hook_token_key, self.hook_token_value, self.hook_phi = (
            HookPoint() for _ in range(4)
        )

    def forward(
        self,
        context: Float[Tensor, "batch token d_model"],
        keys: Float[Tensor, "batch channel d_model"],
    ) -> Float[Tensor, "batch channel"]:
        """Pool, token by token."""
        k = self.hook_token_key(context @ self.hook_dynamic_key(keys).mT)
        v = self.hook_token_value(context @ self.W_V.mT)
        return self.hook_phi((k * v).mean(-2))


class PooledBlock(nn.Module):
    """One layer of (6): keys from the workspace, a statistic, and what it adds to the workspace.

    `attn` is a `Pooling`; `hook_key_pre` and `hook_key_post` are the hidden units of the keys' MLP,
    `hook_gate` is Q p, `hook_update` what is added, and `hook_workspace` the workspace after it.
    """

    def __init__(self, parameters: Mapping[str, Tensor], layer: int) -> None:
        super().__init__()
        self.W_Q, self.W_O, self.W_in, self.b_in, self.W_out, self.b_out = (
            nn.Parameter(parameters[name][layer].clone())
            for name in ("W_Q", "W_O", "W_in", "b_in", "W_out", "b_out")
        )
        self.attn = Pooling(parameters["W_V"][layer])
        self.hook_key_pre, self.hook_key_post, self.hook_gate = (HookPoint() for _ in range(3))
        self.hook_update, self.hook_workspace = HookPoint(), HookPoint()

    def forward(
        self,
        workspace: Float[Tensor, "batch d_workspace"],
        context: Float[Tensor, "batch token d_model"],
    ) -> Float[Tensor, "batch d_workspace"]:
        """Return the workspace of the next layer."""
        hidden = self.hook_key_post(
            gelu(self.hook_key_pre(_norm(workspace) @ self.W_in + self.b_in))
        )
        keys = _norm(torch.einsum("bm,mcz->bcz", hidden, self.W_out) + self.b_out)
        pooled = self.attn(context, keys)
        gated = pooled * self.hook_gate(workspace @ self.W_Q.mT)
        added = self.hook_update(gated @ self.W_O.mT / self.W_O.shape[-1] ** 0.5)
        return self.hook_workspace(workspace + added)


class OutputMlp(nn.Module):
    """One MLP of the output: `hook_query_pre`, `hook_query_post` and `hook_query_mlp_out`."""

    def __init__(self, parameters: Mapping[str, Tensor], number: int) -> None:
        super().__init__()
        self.W_in, self.b_in, self.W_out, self.b_out = (
            nn.Parameter(parameters[f"out_{name}"][number].clone())
            for name in ("W_in", "b_in", "W_out", "b_out")
        )
        self.hook_query_pre, self.hook_query_post, self.hook_query_mlp_out = (
            HookPoint() for _ in range(3)
        )

    def forward(
        self, stream: Float[Tensor, "batch query d_residual"]
    ) -> Float[Tensor, "batch query d_residual"]:
        """Return what is added to the stream."""
        hidden = self.hook_query_post(
            gelu(self.hook_query_pre(_norm(stream) @ self.W_in + self.b_in))
        )
        return self.hook_query_mlp_out(hidden @ self.W_out + self.b_out)


class Readout(nn.Module):
    """What a query is read through: MLPs, then a linear map; `hook_query_resid` is (x, 0) ⊕ p."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        numbers = range(len(parameters["out_W_in"]))
        self.mlps = nn.ModuleList(OutputMlp(parameters, number) for number in numbers)
        self.W_U = nn.Parameter(parameters["W_U"].clone())
        self.b_U = nn.Parameter(parameters["b_U"].clone())
        self.hook_query_resid, self.hook_prediction = HookPoint(), HookPoint()

    def forward(
        self,
        queries: Float[Tensor, "batch query d_model"],
        workspace: Float[Tensor, "batch d_workspace"],
    ) -> Float[Tensor, "batch query"]:
        """Return the predictions."""
        shared = workspace[:, None].expand(-1, queries.shape[1], -1)
        stream = self.hook_query_resid(torch.cat([queries, shared], -1))
        for mlp in self.mlps:
            stream = stream + mlp(stream)
        return self.hook_prediction(stream @ self.W_U + self.b_U)


class BilinearReadout(nn.Module):
    """ŷ = Σ_c O_c φ_c (Q z)_c.

    `hook_channel_query` is Q z of each query, `hook_channel_result` the term of each channel.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.W_Q = nn.Parameter(parameters["W_Q"][0].clone())
        self.W_O = nn.Parameter(parameters["W_O"][0].clone())
        self.hook_channel_query, self.hook_channel_result, self.hook_prediction = (
            HookPoint() for _ in range(3)
        )

    def forward(
        self,
        queries: Float[Tensor, "batch query d_model"],
        pooled: Float[Tensor, "batch channel"],
    ) -> Float[Tensor, "batch query"]:
        """Return the predictions."""
        gated = self.hook_channel_query(queries @ self.W_Q.mT)
        return self.hook_prediction(
            self.hook_channel_result(gated * (pooled * self.W_O)[:, None]).sum(-1)
        )


class LinearBlock(nn.Module):
    """The one layer of a model without MLPs: keys that do not depend on the context."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.W_K = nn.Parameter(parameters["W_K"][0].clone())
        self.attn = Pooling(parameters["W_V"][0])

    def forward(self, context: Float[Tensor, "batch token d_model"]) -> Tensor:
        """Return φ."""
        return self.attn(context, self.W_K.expand(len(context), -1, -1))


class PooledTransformer(HookedTransformer):
    """A HookedTransformer that reads (batch, pos, d_model), the queries last, and predicts each.

    `model(inputs)` returns (batch, query). Positions share one workspace, (batch, d_workspace), in
    place of a residual stream: `blocks.L.hook_workspace` is what layer L leaves of it; the first
    one finds ε. `run_with_cache` and `run_with_hooks` are TransformerLens's.
    """

    def __init__(
        self, model: "PooledAttention", task: ContinuousTask, parameters: Mapping[str, Tensor]
    ) -> None:
        like, sizes = parameters["W_V"], model.sizes(task)
        cfg = HookedTransformerConfig(
            n_layers=model.n_layers,
            n_heads=1,
            d_model=sizes["d_model"],
            d_head=1,
            n_ctx=task.n_positions,
            d_vocab=1,
            attn_only=True,
            normalization_type=None,
            init_weights=False,
            dtype=like.dtype,
            device=str(like.device),
        )
        with warnings.catch_warnings():
            # It is gone from TransformerLens 4, and this project stays below 4 for that reason.
            warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
            super().__init__(cfg, move_to_device=False)
        for name in ("embed", "pos_embed", "unembed", "hook_pos_embed", "hook_embed"):
            delattr(self, name)
        self.split = model.split
        self.task, self.epsilon, self.d_workspace = task, model.epsilon, model.workspace(task)
        self.hook_context, self.hook_queries = HookPoint(), HookPoint()
        blocks: list[PooledBlock | LinearBlock]
        if model.feedforward:
            blocks = [PooledBlock(parameters, layer) for layer in range(model.n_layers)]
            self.output = Readout(parameters)
        else:
            blocks = [LinearBlock(parameters)]
            self.output = BilinearReadout(parameters)
        self.blocks = nn.ModuleList(blocks)  # pyright: ignore[reportAttributeAccessIssue]
        self.setup()  # names the hook points

    def forward(  # type: ignore[override]
        self, inputs: Float[Tensor, "batch pos d_model"], *, return_type: str | None = "logits"
    ) -> Float[Tensor, "batch query"]:
        """Return the prediction of every query.

        `return_type` is accepted as TransformerLens's tools give it and changes nothing; `"loss"`
        and `"both"` are refused.

        Raises
        ------
        InputError
            If `inputs` is not floating point of shape (batch, pos, d_model), with a context.
        """
        if return_type not in ("logits", None):
            raise InputError(
                f"this model has no loss of its own (return_type={return_type!r}); the run's task "
                "has one: run.task.loss(model(inputs), targets)"
            )
        self._require_prompts(inputs)
        context, queries = self.split(self.task, inputs)
        context, queries = self.hook_context(context), self.hook_queries(queries)
        if isinstance(self.output, BilinearReadout):
            return self.output(queries, self.blocks[0](context))
        workspace = inputs.new_full((len(inputs), self.d_workspace), self.epsilon)
        for block in self.blocks:
            workspace = block(workspace, context)
        return self.output(queries, workspace)

    def _require_prompts(self, inputs: object) -> None:
        width, n_queries = self.cfg.d_model, self.task.target_sizes.get("query", 1)
        wanted = (
            f"this model reads continuous inputs (batch, pos, {width}), a context and then "
            f"{n_queries} queries"
        )
        if not isinstance(inputs, Tensor):
            raise InputError(f"{wanted}, as a tensor; given {type(inputs).__name__}")
        if not inputs.is_floating_point():
            raise InputError(f"{wanted}, not token ids; given {inputs.dtype}")
        if inputs.ndim != 3 or inputs.shape[-1] != width or inputs.shape[1] <= n_queries:
            raise InputError(f"{wanted}; given shape {tuple(inputs.shape)}")


def _norm(values: Float[Tensor, "*batch entry"]) -> Float[Tensor, "*batch entry"]:
    return layer_norm(values, values.shape[-1:], eps=EPS)
