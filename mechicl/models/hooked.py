"""HookedTransformers that read continuous inputs: the one module that touches their internals."""

import warnings
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.components.attention import Attention

from mechicl.errors import InputError

HOOK_DIMS: dict[str, tuple[str, ...]] = {
    "hook_resid_pre": ("batch", "pos", "d_model"),
    "hook_resid_post": ("batch", "pos", "d_model"),
    "hook_attn_in": ("batch", "pos", "head", "d_model"),
    "hook_attn_out": ("batch", "pos", "d_model"),
    "hook_q": ("batch", "pos", "head", "d_head"),
    "hook_k": ("batch", "pos", "head", "d_head"),
    "hook_v": ("batch", "pos", "head", "d_head"),
    "hook_z": ("batch", "pos", "head", "d_head"),
    "hook_attn_scores": ("batch", "head", "query_pos", "key_pos"),
    "hook_pattern": ("batch", "head", "query_pos", "key_pos"),
    "hook_result": ("batch", "pos", "head", "d_model"),
}
"""Dims of what passes each hook point of attention, by the last part of its name."""

TOKEN_HOOK_DIMS: dict[str, tuple[str, ...]] = {
    "hook_embed": ("batch", "pos", "d_model"),
    "hook_pos_embed": ("batch", "pos", "d_model"),
    "hook_resid_mid": ("batch", "pos", "d_model"),
    "hook_mlp_out": ("batch", "pos", "d_model"),
    "hook_pre": ("batch", "pos", "d_mlp"),
    "hook_post": ("batch", "pos", "d_mlp"),
    "hook_normalized": ("batch", "pos", "d_model"),
    "hook_in": ("batch", "pos", "d_model"),
    "hook_out": ("batch", "pos", "d_vocab"),
}
"""The same of what models of tokens have besides: embeddings, MLPs, norms, unembedding."""

POOLED_HOOK_DIMS: dict[str, tuple[str, ...]] = {
    "hook_context": ("batch", "pos", "d_model"),
    "hook_queries": ("batch", "query", "d_model"),
    "hook_key_pre": ("batch", "d_mlp"),
    "hook_key_post": ("batch", "d_mlp"),
    "hook_dynamic_key": ("batch", "channel", "d_model"),
    "hook_token_key": ("batch", "pos", "channel"),
    "hook_token_value": ("batch", "pos", "channel"),
    "hook_phi": ("batch", "channel"),
    "hook_gate": ("batch", "channel"),
    "hook_update": ("batch", "d_workspace"),
    "hook_workspace": ("batch", "d_workspace"),
    "hook_channel_query": ("batch", "query", "channel"),
    "hook_channel_result": ("batch", "query", "channel"),
    "hook_query_resid": ("batch", "query", "d_residual"),
    "hook_query_pre": ("batch", "query", "d_mlp"),
    "hook_query_post": ("batch", "query", "d_mlp"),
    "hook_query_mlp_out": ("batch", "query", "d_residual"),
    "hook_prediction": ("batch", "query"),
}
"""The same of pooling models, whose positions are of a context or queries."""


class StrictAttention(Attention):
    """Attention to the positions before the query's own, which is left out."""

    def _make_causal_mask(
        self,
        query_ctx_length: int,
        key_ctx_length: int,
        past_kv_pos_offset: int,
        device: torch.device,
    ) -> Tensor:
        queries = torch.arange(query_ctx_length, device=device)[:, None] + past_kv_pos_offset
        keys = torch.arange(key_ctx_length, device=device)[None, :]
        return (keys < queries)[None, None]


class WeighedAttention(StrictAttention):
    """Strict attention whose weights are another function of the scores than softmax.

    `weigh` takes scores (batch, head, query_pos, key_pos), finite, and which keys are `allowed`, of
    the same shape, and returns the pattern. A key is allowed where its score is not -inf, as for
    softmax: a hook on the scores that sets one to -inf takes the key out.
    """

    weigh: Callable[..., Tensor]

    def forward(  # type: ignore[override]
        self,
        query_input: Float[Tensor, "batch pos ..."],
        key_input: Float[Tensor, "batch pos ..."],
        value_input: Float[Tensor, "batch pos ..."],
        **unused: object,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Attend as TransformerLens does, hook points included, but for the softmax."""
        given = [name for name, value in unused.items() if value is not None]
        if given:
            raise InputError(f"this attention takes no {', '.join(given)}")
        q, k, v = self.calculate_qkv_matrices(query_input, key_input, value_input)
        scores = self.calculate_attention_scores(q, k)
        masked = self.hook_attn_scores(self.apply_causal_mask(scores))
        allowed = ~masked.isneginf()
        pattern = self.hook_pattern(self.weigh(masked.where(allowed, 0.0), allowed=allowed))
        z = self.calculate_z_scores(v, pattern)
        if not self.cfg.use_attn_result:
            return torch.einsum("bqhe,hed->bqd", z, self.W_O) + self.b_O
        return self.hook_result(torch.einsum("bqhe,hed->bqhd", z, self.W_O)).sum(-2) + self.b_O


class ContinuousTransformer(HookedTransformer):
    """A HookedTransformer whose input is the residual stream itself, (batch, pos, d_model).

    It has neither embedding nor unembedding: `model(inputs)` returns the residual stream after the
    last block. `run_with_cache`, `run_with_hooks` and hook names are TransformerLens's. Attention
    is strictly causal; a position that may attend to nothing has a pattern of zeros.
    """

    def __init__(
        self,
        cfg: HookedTransformerConfig,
        weigh: Callable[..., Tensor] | None = None,
    ) -> None:
        with warnings.catch_warnings():
            # It is gone from TransformerLens 4, and this project stays below 4 for that reason.
            warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
            super().__init__(cfg, move_to_device=False)
        for index, block in enumerate(self.blocks):
            if weigh is None:
                block.attn = StrictAttention(cfg, "global", index)
            else:
                block.attn = WeighedAttention(cfg, "global", index)
                block.attn.weigh = weigh
        self.setup()  # names the hook points of the new attention layers
        for name, parameter in self.named_parameters():
            parameter.data.zero_()  # biases and embeddings, which this model does not have, stay so
            parameter.requires_grad_(name.split(".")[-1].startswith("W_") and ".attn." in name)

    @classmethod
    def from_parameters(
        cls,
        parameters: Mapping[str, Float[Tensor, "layer head ..."]],
        *,
        n_positions: int,
        score_scale: float,
        weigh: Callable[..., Tensor] | None = None,
    ) -> "ContinuousTransformer":
        """Build an attention-only model that holds copies of W_Q, W_K, W_V and W_O.

        `weigh` takes the place of softmax, as in `WeighedAttention`.
        """
        n_layers, n_heads, d_model, d_head = parameters["W_Q"].shape
        cfg = HookedTransformerConfig(
            n_layers=n_layers,
            n_heads=n_heads,
            d_model=d_model,
            d_head=d_head,
            n_ctx=n_positions,
            d_vocab=1,
            attn_only=True,
            normalization_type=None,
            attn_scale=1 / score_scale,
            init_weights=False,
            dtype=parameters["W_Q"].dtype,
            device=str(parameters["W_Q"].device),
        )
        model = cls(cfg, weigh)
        with torch.no_grad():
            for name, stacked in parameters.items():
                for block, weight in zip(model.blocks, stacked, strict=True):
                    getattr(block.attn, name).copy_(weight)
        return model

    def forward(  # type: ignore[override]
        self,
        inputs: Float[Tensor, "batch pos d_model"],
        *,
        stop_at_layer: int | None = None,
        return_type: str | None = "logits",
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream after the last block, or before block `stop_at_layer`.

        `return_type` is accepted as TransformerLens's tools give it: there are no logits and no
        loss, so it changes nothing, and `"loss"` and `"both"` are refused.

        Raises
        ------
        InputError
            If `inputs` is not floating point of shape (batch, pos, d_model): these models have no
            tokens.
        """
        if return_type not in ("logits", None):
            raise InputError(
                f"this model has no loss of its own (return_type={return_type!r}); the run's task "
                "has one: run.task.loss(model(inputs)[:, -1, -1], targets), with -N: in place of "
                "the last -1 where a target has N responses"
            )
        self._require_continuous(inputs)
        stop = self.cfg.n_layers if stop_at_layer is None else stop_at_layer
        return super().forward(  # pyright: ignore[reportCallIssue]
            inputs, return_type="logits", start_at_layer=0, stop_at_layer=stop
        )

    def _require_continuous(self, inputs: object) -> None:
        width = self.cfg.d_model
        wanted = f"this model reads continuous inputs (batch, pos, {width})"
        if not isinstance(inputs, Tensor):
            raise InputError(f"{wanted} as a tensor; given {type(inputs).__name__}")
        if not inputs.is_floating_point():
            raise InputError(f"{wanted}, not token ids; given {inputs.dtype}")
        if inputs.ndim != 3 or inputs.shape[-1] != width:
            raise InputError(f"{wanted}; given shape {tuple(inputs.shape)}")


def hook_dims(name: str) -> tuple[str, ...]:
    """Return the dims of what passes the hook point `name`, batch first."""
    known = HOOK_DIMS | TOKEN_HOOK_DIMS | POOLED_HOOK_DIMS
    last = name.rsplit(".", 1)[-1]
    if last not in known:
        raise InputError(f"no dims are known for hook point {name!r}; known: {', '.join(known)}")
    return known[last]
