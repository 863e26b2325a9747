"""Every model on every task trains, resumes to the same bits, and compiles."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mechicl import models, tasks
from mechicl.run import open_run
from mechicl.training.batches import draw_from
from mechicl.training.loop import Progress, train
from mechicl.training.recipe import Recipe
from mechicl.training.step import initial_state, make_step

TASKS = {
    "one": {"name": "linear_regression", "d": 2},
    "kms": {"name": "linear_regression", "d": 3, "covariance": {"rho": 0.5}},
    "rows": {"name": "linear_regression", "d": 2, "covariance": [[2, 0.3], [0.3, 1]]},
    "several": {"name": "multi_task_regression", "d": 3, "supports": [[0, 1], [2], [2, 1]]},
    "latent": {
        "name": "latent_regression",
        "prior": {"kind": "tree", "depth": 2},
        "n_context": 20,
        "n_queries": 3,
    },
    "latent_gaussian": {
        "name": "latent_regression",
        "prior": {"kind": "gaussian", "d": 3},
        "context": "tokens",
    },
    "chain": {"name": "markov_chain", "d": 4, "blocks": [1, 2], "n_predictions": 5},
}
MODELS = {
    "softmax": {"name": "softmax_attention"},
    "linear": {"name": "linear_attention"},
    "exp": {"name": "normalized_attention", "activation": "exp"},
    "affine": {"name": "normalized_attention", "activation": "affine", "coefficient": 0.1},
    "square": {"name": "normalized_attention", "activation": "square"},
    "one_plus_tanh": {"name": "normalized_attention", "activation": "one_plus_tanh"},
    "pooled": {"name": "pooled_attention", "n_layers": 2},
    "pooled_linear": {"name": "pooled_attention", "n_channels": 2, "feedforward": False},
    "sparse": {"name": "sparse_attention", "init_scale": 0.1},
    "decoder": {"name": "decoder", "n_layers": 2, "d_head": 3, "d_mlp": 5, "dropout": 0.1},
    "window": {"name": "decoder", "d_head": 3, "d_mlp": 5, "context": 2},
}
TOKENS = ("sparse", "decoder", "window")
POOLED = ("pooled", "pooled_linear")
CLIPPED = {"optimizer": {"name": "adamw", "learning_rate": 0.02, "clip_norm": 0.1}}
FIXED = {"training_set": 100, "dropout_on": "first_batch"}


def recipe(on: str, name: str, **settings: object) -> Recipe:
    base = {
        "name": "tiny",
        "task": TASKS[on] | ({"n_context": 6} if on not in ("chain", "latent") else {}),
        "model": MODELS[name] | ({} if name in POOLED else {"n_heads": 3}),
        "optimizer": {"learning_rate": 0.02},
        "batch_size": 32,
        "n_steps": 60,
        "seeds": [1, 4],
        "checkpoints": {"every": 20, "per_decade": 1},
    }
    return Recipe.model_validate(base | settings)


def test_all_that_is_registered_is_trained_here() -> None:
    assert {each["name"] for each in TASKS.values()} == set(tasks.names())
    assert {each["name"] for each in MODELS.values()} == set(models.names())


@pytest.mark.parametrize(
    ("on", "name"),
    [
        *(("one", name) for name in MODELS if name not in TOKENS),
        *((on, "softmax") for on in ("kms", "rows")),
    ]
    + [("several", name) for name in ("softmax", "linear", "one_plus_tanh")]
    + [("chain", name) for name in ("sparse", "window")]
    + [("latent", "pooled"), ("latent_gaussian", "pooled_linear")],
)
def test_it_trains_and_stores_what_it_is(tmp_path: Path, on: str, name: str) -> None:
    """The loss falls, it is that of the stored weights, and the constants are stored."""
    chosen = recipe(on, name)
    train(chosen, tmp_path / "run", compile=False)
    run = open_run(tmp_path / "run")
    assert run.recipe == chosen
    loss = run.metrics["loss"].values
    assert np.isfinite(loss).all()
    # Medians: the mean of `affine` is at the mercy of one context whose normaliser is near 0.
    assert np.median(loss[:, -20:]) < 0.97 * np.median(loss[:, :10])
    batch = next(draw_from(chosen, [1, 4], 20)).examples
    prompts = run.task.prompts(batch)
    weights = {
        str(key): torch.from_numpy(value.sel(step=20).values) for key, value in run.params.items()
    }
    predictions = chosen.model.predict(run.task, weights, prompts.inputs)
    expected = chosen.task.loss(predictions, prompts.targets).mean(-1)
    np.testing.assert_allclose(loss[:, 20], expected, rtol=1e-4)
    stored = 0
    for key, (variable, value) in {**run.task.constants(), **chosen.model.constants()}.items():
        assert run.trajectory[key].dims == variable.dims
        np.testing.assert_allclose(run.trajectory[key], np.asarray(value, float), rtol=1e-12)
        stored += 1
    assert stored >= 6
    final = {key: torch.from_numpy(v.sel(step=60, seed=4).values) for key, v in run.params.items()}
    predicted = chosen.model.predict(run.task, final, prompts.inputs[1])
    hooked = run.model(step=60, seed=4)
    sequences = chosen.model.windows(run.task, prompts.inputs[1])
    one = chosen.model.answers(run.task, hooked(sequences)).detach()
    torch.testing.assert_close(one, predicted, rtol=1e-4, atol=1e-5)
    prompts = run.task.sample(3, seed=0)
    point = "attn.hook_phi" if name in POOLED else "hook_resid_post"
    cached = run.cache(f"blocks.0.{point}", prompts=prompts, steps=60, seeds=4)
    n_sequences = 3 * getattr(chosen.model, "n_windows", lambda task: 1)(run.task)
    assert cached.sizes["batch"] == n_sequences


@pytest.mark.parametrize(
    ("on", "name", "settings"),
    [
        ("several", "one_plus_tanh", {}),
        ("kms", "linear", {}),
        ("chain", "decoder", FIXED),
        ("latent", "pooled", {"optimizer": {"schedule": "cosine", "warmup_steps": 30}}),
        # A norm is a sum over parameters, which rounds by their order.
        *((on, name, CLIPPED) for on, name in (("chain", "decoder"), ("kms", "softmax"))),
    ],
)
def test_resuming_gives_the_same_bits(
    tmp_path: Path, on: str, name: str, settings: dict[str, object]
) -> None:
    chosen = recipe(on, name, **settings)

    def interrupt(progress: Progress) -> None:
        if progress.step >= 20:
            raise KeyboardInterrupt

    train(chosen, tmp_path / "whole", compile=False)
    with pytest.raises(KeyboardInterrupt):
        train(chosen, tmp_path / "cut", compile=False, on_progress=interrupt)
    assert not open_run(tmp_path / "cut").complete
    train(chosen, tmp_path / "cut", compile=False, resume=True)
    whole, cut = (open_run(tmp_path / which).trajectory for which in ("whole", "cut"))
    assert cut.attrs["complete"]
    for key in whole.variables:
        np.testing.assert_array_equal(whole[key], cut[key], err_msg=str(key))


@pytest.mark.parametrize(
    ("on", "name"),
    [
        ("kms", "linear"),
        ("several", "one_plus_tanh"),
        ("chain", "sparse"),
        ("chain", "decoder"),
        ("latent", "pooled"),
        ("latent_gaussian", "pooled_linear"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of itself
def test_the_step_is_one_graph(on: str, name: str) -> None:
    """What a compiler needs, without one: nothing in the step is beyond torch's tracing."""
    chosen = recipe(on, name)
    step, state = make_step(chosen), initial_state(chosen, (1, 4))
    batch = next(draw_from(chosen, [1, 4], 0))
    traced = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        (expected, loss), (given, traced_loss) = step(state, *batch), traced(state, *batch)
    torch.testing.assert_close(traced_loss, loss)
    for key, value in expected.parameters.items():
        torch.testing.assert_close(given.parameters[key], value)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("on", "name"),
    [("one", name) for name in MODELS if name not in ("exp", *TOKENS)]
    + [("latent", name) for name in POOLED]
    + [("kms", "softmax"), ("rows", "linear"), ("several", "softmax"), ("several", "linear")],
)
def test_it_compiles_whole(tmp_path: Path, on: str, name: str) -> None:
    """No remark about a compiler, and the weights of an eager run to rounding."""
    # Adam divides by the size of a gradient: where that is rounding alone, eps has to be above it.
    adam = {"learning_rate": 0.02, "eps": 1e-3}
    chosen, remarks = recipe(on, name, n_steps=20, checkpoints={"every": 10}, optimizer=adam), []
    train(chosen, tmp_path / "compiled", notify=remarks.append)
    if remarks and "C++ compiler" in remarks[0]:
        pytest.skip(f"{remarks[0]}; lifted where there is a compiler")
    assert remarks == []
    train(chosen, tmp_path / "eager", compile=False)
    compiled, eager = (open_run(tmp_path / which).params for which in ("compiled", "eager"))
    for key in eager:
        np.testing.assert_allclose(compiled[key], eager[key], rtol=0, atol=1e-5, err_msg=str(key))
