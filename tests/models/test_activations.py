"""What passes the hook points of every architecture: its dims and its shape."""

import pytest
import torch

from mechicl import models
from mechicl.models import hooked
from mechicl.models.activations import HookShape, hook_shapes
from mechicl.models.base import Model
from mechicl.models.decoder import Decoder
from mechicl.models.linear_attention import LinearAttention
from mechicl.models.normalized_attention import NormalizedAttention
from mechicl.models.pooled_attention import PooledAttention
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.models.sparse_attention import SparseAttention
from mechicl.tasks import Task
from mechicl.tasks.latent_regression import LatentRegression
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.markov_chain import MarkovChain
from mechicl.tasks.streams import generator

VECTORS = LinearRegression(d=3, n_context=7)
TOKENS = MarkovChain(d=4, blocks=((0, 1), (2, 3)), n_predictions=3)
LATENTS = LatentRegression.model_validate(
    {"prior": {"kind": "tree", "depth": 2, "alpha": 0.6}, "n_context": 9, "n_queries": 3}
)

MODELS: dict[str, tuple[Model, Task]] = {
    "softmax": (SoftmaxAttention(n_heads=2), VECTORS),
    "linear": (LinearAttention(), VECTORS),
    "tanh": (NormalizedAttention(activation="one_plus_tanh", n_heads=3), VECTORS),
    "sparse": (SparseAttention(n_heads=2), TOKENS),
    "sparse, windows": (SparseAttention(n_heads=2, context=4), TOKENS),
    "decoder": (Decoder(n_layers=2, n_heads=2, d_head=5, d_mlp=7), TOKENS),
    "decoder, windows": (Decoder(n_heads=2, d_head=5, d_mlp=7, context=4), TOKENS),
    "pooled": (PooledAttention(n_layers=2, n_channels=2), LATENTS),
    "pooled, linear": (PooledAttention(n_channels=3, feedforward=False), LATENTS),
}


def test_every_architecture_is_here() -> None:
    assert {model.name for model, _ in MODELS.values()} == set(models.names())


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_what_passes(name: str) -> None:
    """Held against run_with_cache, on another prompt and with other weights."""
    model, task = MODELS[name]
    model_ = model.hooked(task, model.initial(task, generator("test", 5)))
    inputs = torch.from_numpy(task.sample(1, seed=9)["inputs"].values)
    _, cache = model_.run_with_cache(model.windows(task, inputs))
    found = hook_shapes(model, task)
    fired = [point for point, (_, shape) in found.items() if shape is not None]
    assert fired == list(cache), "they are in the order in which they fire"
    assert [found[point].shape for point in fired] == [value.shape for value in cache.values()]
    assert set(found) == set(model_.hook_dict)
    assert list(found)[: len(fired)] == fired, "what never fires comes last"


@pytest.mark.parametrize("name", MODELS)
def test_dims_have_one_size_each(name: str) -> None:
    """An axis called by the wrong name would have the size of another one."""
    model, task = MODELS[name]
    sizes: dict[str, set[int]] = {}
    for point, (dims, shape) in hook_shapes(model, task).items():
        assert dims is not None or point.endswith(("hook_scale", "_input", "hook_mlp_in")), point
        for dim, size in zip(dims or (), shape or (), strict=False):
            sizes.setdefault(dim, set()).add(size)
    assert {dim: len(each) for dim, each in sizes.items()} == dict.fromkeys(sizes, 1)
    assert sizes["batch"] == {3 if "windows" in name else 1}


def test_shapes_of_a_small_model_by_hand() -> None:
    found = hook_shapes(*MODELS["softmax"])
    assert found["blocks.0.attn.hook_pattern"] == (
        ("batch", "head", "query_pos", "key_pos"),
        (1, 2, 8, 8),
    )
    assert found["blocks.0.hook_resid_post"] == HookShape(("batch", "pos", "d_model"), (1, 8, 4))
    # No tokens are embedded, and results of single heads are not made unless they are asked for.
    assert found["hook_embed"] == HookShape(("batch", "pos", "d_model"), None)
    assert found["blocks.0.attn.hook_result"].shape is None
    found = hook_shapes(*MODELS["decoder"])
    assert found["unembed.hook_out"] == HookShape(("batch", "pos", "d_vocab"), (1, 6, 4))
    assert found["blocks.1.ln2.hook_scale"] == HookShape(None, (1, 6, 1))


def test_dims_that_do_not_fit_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model from elsewhere may use a name of ours for what has other axes."""
    point = "blocks.0.attn.hook_z"
    assert hook_shapes(*MODELS["softmax"])[point].dims == ("batch", "pos", "head", "d_head")
    monkeypatch.setitem(hooked.HOOK_DIMS, "hook_z", ("batch", "pos", "d_head"))
    assert hook_shapes(*MODELS["softmax"])[point] == HookShape(None, (1, 8, 2, 4))
