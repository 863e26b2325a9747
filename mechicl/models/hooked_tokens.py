"""HookedTransformers of token sequences, made from the parameters of a run."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.components.transformer_block import TransformerBlock

from mechicl.errors import InputError
from mechicl.models.decoder import EPS
from mechicl.tasks import TokenTask

if TYPE_CHECKING:
    from mechicl.models.decoder import Decoder
    from mechicl.models.sparse_attention import SparseAttention


class TokenTransformer(HookedTransformer):
    """A HookedTransformer that refuses what are no token ids of its own, before any layer runs."""

    def __init__(self, cfg: HookedTransformerConfig) -> None:
        with warnings.catch_warnings():
            # It is gone from TransformerLens 4, and this project stays below 4 for that reason.
            warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
            super().__init__(cfg, move_to_device=False)

    def forward(  # type: ignore[override]
        self, input: Int[Tensor, "batch pos"] | Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Run as TransformerLens does.

        Raises
        ------
        InputError
            If `input` is not token ids (batch, pos) of the vocabulary, at most as many as the model
            has positions. Where `start_at_layer` is given, it is a residual stream.
        """
        if kwargs.get("start_at_layer") is None:
            self._require_tokens(input)
        return super().forward(input, *args, **kwargs)

    def _require_tokens(self, input: object) -> None:
        n_ctx, d_vocab = self.cfg.n_ctx, self.cfg.d_vocab
        wanted = (
            f"this model reads token ids (batch, pos), from 0 to {d_vocab - 1}, at most {n_ctx} "
            "positions"
        )
        if not isinstance(input, Tensor):
            raise InputError(f"{wanted}, as a tensor; given {type(input).__name__}")
        if input.is_floating_point() or input.dtype == torch.bool:
            raise InputError(f"{wanted}, not continuous inputs; given {input.dtype}")
        if input.ndim != 2 or not 0 < input.shape[1] <= n_ctx:
            raise InputError(
                f"{wanted}; given shape {tuple(input.shape)}. A model with a `context` reads "
                "windows: run.recipe.model.windows(run.task, inputs)"
            )
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < d_vocab:
            raise InputError(f"{wanted}; given {int(input.min())} to {int(input.max())}")


class PostNormBlock(TransformerBlock):
    """A block that normalises what it has added, x ← LN(x + f(x)), for attention and for the MLP.

    Hook points are TransformerLens's; `hook_resid_mid` and `hook_resid_post` are after the norms,
    where the next sublayer reads, `hook_attn_out` and `hook_mlp_out` are what is added.
    """

    def forward(  # type: ignore[override]
        self, resid_pre: Float[Tensor, "batch pos d_model"], **unused: object
    ) -> Float[Tensor, "batch pos d_model"]:
        """Attend, normalise, apply the MLP, normalise."""
        given = [name for name, value in unused.items() if value is not None]
        if given:
            raise InputError(f"this block takes no {', '.join(given)}")
        resid_pre = self.hook_resid_pre(resid_pre)
        attn_out = self.hook_attn_out(
            self.attn(query_input=resid_pre, key_input=resid_pre, value_input=resid_pre)
        )
        resid_mid = self.hook_resid_mid(self.ln1(resid_pre + attn_out))
        mlp_out = self.hook_mlp_out(self.mlp(resid_mid))
        return self.hook_resid_post(self.ln2(resid_mid + mlp_out))


def decoder(
    model: "Decoder", task: TokenTask, parameters: Mapping[str, Float[Tensor, "..."]]
) -> TokenTransformer:
    """Return the decoder with a copy of `parameters`; the temperature is in W_U and b_U."""
    scale = model.d_head**-0.5 if model.score_scale is None else model.score_scale
    hooked = _empty(
        task,
        parameters["W_E"],
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        d_model=model.d_model,
        d_head=model.d_head,
        d_mlp=model.d_mlp,
        n_ctx=model.n_read(task),
        act_fn="relu",
        normalization_type="LN",
        eps=EPS,
        attn_scale=1 / scale,
    )
    hooked.ln_final = nn.Identity()
    for index in range(model.n_layers):
        hooked.blocks[index] = PostNormBlock(hooked.cfg, index)
    hooked.setup()  # names the hook points of the new blocks
    _without_biases(hooked)
    _fill(hooked.embed.W_E, parameters["W_E"])
    _fill(hooked.pos_embed.W_pos, parameters["W_pos"])
    _fill(hooked.unembed.W_U, parameters["W_U"] / task.temperature)
    _fill(hooked.unembed.b_U, parameters["b_U"] / task.temperature)
    for index, block in enumerate(hooked.blocks):
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            _fill(getattr(block.attn, name), parameters[name][index])
        for name in ("W_in", "b_in", "W_out", "b_out"):
            _fill(getattr(block.mlp, name), parameters[name][index])
        for norm in ("ln1", "ln2"):
            _fill(getattr(block, norm).w, parameters[f"{norm}_w"][index])
            _fill(getattr(block, norm).b, parameters[f"{norm}_b"][index])
    return hooked


def sparse_attention(
    model: "SparseAttention", task: TokenTask, parameters: Mapping[str, Float[Tensor, "..."]]
) -> TokenTransformer:
    """Return the minimal model as attention over a stream of tokens, positions and outputs.

    The residual stream has d coordinates for the one-hot token, one for each position, and d in
    which heads write logits (times the temperature) and the unembedding reads them: so the residual
    adds nothing to the output. W_K picks what KQ reads, W_Q is KQᵀ, W_V is OVᵀ, W_O places outputs.
    """
    kq, ov = parameters["KQ"][0], parameters["OV"][0]
    d, n_read = task.d_vocab, model.n_read(task)
    width, d_head = d + n_read, max(kq.shape[-1], d)
    read = slice(0 if model.reads_tokens else d, width)
    hooked = _empty(
        task,
        kq,
        n_layers=1,
        n_heads=model.n_heads,
        d_model=width + d,
        d_head=d_head,
        n_ctx=n_read,
        attn_only=True,
        normalization_type=None,
        attn_scale=1 / model.scale(task),
    )
    _without_biases(hooked)
    attention = hooked.blocks[0].attn
    with torch.no_grad():
        for parameter in hooked.parameters():
            parameter.zero_()
        hooked.embed.W_E[:, :d] = torch.eye(d)
        hooked.pos_embed.W_pos[:, d:width] = torch.eye(n_read)
        hooked.unembed.W_U[width:] = torch.eye(d) / task.temperature
        attention.W_K[:, read, : kq.shape[-2]] = torch.eye(kq.shape[-2], dtype=kq.dtype)
        attention.W_Q[:, read, : kq.shape[-2]] = kq.mT
        attention.W_V[:, : ov.shape[-1], :d] = ov.mT
        attention.W_O[:, :d, width:] = torch.eye(d)
    return hooked


def _empty(
    task: TokenTask, like: Tensor, *, attn_scale: float, **settings: Any
) -> TokenTransformer:
    """Return a model of that architecture, of the dtype and on the device of `like`."""
    cfg = HookedTransformerConfig(
        d_vocab=task.d_vocab,
        attn_scale=attn_scale,
        default_prepend_bos=False,
        init_weights=False,
        dtype=like.dtype,
        device=str(like.device),
        **settings,
    )
    return TokenTransformer(cfg)


def _without_biases(hooked: HookedTransformer) -> None:
    """Zero the biases of attention and of the unembedding, which `init_weights=False` leaves."""
    for name, parameter in hooked.named_parameters():
        if name.rsplit(".", 1)[-1].startswith("b_"):
            parameter.data.zero_()
            if ".attn." in name:
                parameter.requires_grad_(False)


def _fill(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
