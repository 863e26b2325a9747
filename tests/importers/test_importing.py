"""The import: whole runs of others' checkpoints, checked by a forward pass and by nothing less."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import yaml
from safetensors.torch import save_file

import mechicl
from mechicl.checkpoints import claim, verify
from mechicl.errors import (
    DamagedRunError,
    InputError,
    MechiclError,
    NothingToAnalyseError,
    RunLockedError,
)
from mechicl.importers import importing
from mechicl.run import Run
from mechicl.training import ImportedRecipe, Recipe
from mechicl.training.loop import train
from tests.importers import theirs

REGRESSION = Recipe.model_validate(theirs.REGRESSION)
CHAIN = Recipe.model_validate(theirs.CHAIN)
NARROW = Recipe.model_validate(
    theirs.REGRESSION | {"model": {"name": "softmax_attention", "score_scale": 3**-0.5}}
)
NARROW_HEADS = {n: {"sizes": {"d_head": 3}} for n in ("W_Q", "W_K", "W_V", "W_O")}
ENCODER = {
    "base": "multihead_attention",
    "parameters": {
        "W_E": {"from": "embed.weight", "layout": "d_vocab d_model"},
        "W_pos": {"from": "positions", "layout": "pos d_model"},
        "W_U": {"from": "unembed.weight", "layout": "d_vocab d_model", "scale": "temperature"},
        "b_U": {"from": "unembed.bias", "layout": "d_vocab", "scale": "temperature"},
    },
}
GPT_BIASES = ("c_attn.bias", "attn.c_proj.bias")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three checkpoints of stacked projections."""
    path = tmp_path_factory.mktemp("stacked")
    theirs.save_steps(theirs.StackedAttention, path)
    return path


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Those, imported."""
    path = tmp_path_factory.mktemp("imported") / "run"
    return brought(folder, path)


def brought(folder: Any, out: Path, **options: Any) -> Run:
    settings: dict[str, Any] = {"recipe": REGRESSION, "mapping": "linear"}
    if not {"outputs", "check", "unchecked"} & set(options):
        settings["check"] = theirs.StackedAttention()
    return mechicl.import_run(folder, out, **settings | options)


def state_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"step-{step:06d}.pt", weights_only=True)


# What comes of it ---------------------------------------------------------------------------------


def test_a_run_like_any_other(run: Run, folder: Path) -> None:
    assert (run.steps.tolist(), run.seeds.tolist(), run.complete) == ([*theirs.STEPS], [0], True)
    assert np.isnan(run.metrics["loss"].values).all()
    assert run.metrics["loss"].shape == (1, 20_000)
    assert run.diverged() == {}
    state = state_of(folder, 1000)
    wanted = state["q_proj.weight"].reshape(2, 6, 6).mT
    np.testing.assert_array_equal(run.params["W_Q"].sel(seed=0, step=1000)[0], wanted)
    assert verify(Path(run.path)) == []
    with xr.open_zarr(Path(run.path) / "trajectory.zarr") as plain:
        assert plain.sizes["step"] == 3


@pytest.mark.parametrize("step", theirs.STEPS)
def test_hooked_models_give_their_outputs(run: Run, folder: Path, step: int) -> None:
    module = theirs.StackedAttention()
    module.load_state_dict(state_of(folder, step))
    inputs = run.task.sample(20, seed=5)["inputs"].values
    ours = run.model(step=step, seed=0)(torch.from_numpy(inputs))[:, -1, -1]
    np.testing.assert_allclose(ours.detach(), theirs.outputs_of(module, inputs), atol=2e-6)


def test_nothing_of_training_is_claimed(run: Run) -> None:
    assert isinstance(run.recipe, ImportedRecipe)
    assert set(run.config) == {"recipe", "origin", "versions"}
    said = yaml.safe_dump(run.config["recipe"])
    for word in ("optimizer", "batch_size", "learning_rate", "device", "checkpoints"):
        assert word not in said
    assert not list(Path(run.path).glob("resume-*"))


def test_where_it_is_from_is_recorded(run: Run, folder: Path) -> None:
    origin = run.config["origin"]
    assert origin["files"][0] == [str(folder / f"step-{step:06d}.pt") for step in theirs.STEPS]
    assert origin["mapping"]["name"] == "linear"
    assert origin["check"]["by"] == ["StackedAttention"]
    each = origin["check"]["checkpoints"]
    assert [check["step"] for check in each] == [*theirs.STEPS]
    assert all(0 < check["error"] < 1e-5 for check in each)
    assert origin["check"]["untested"] == []


def test_the_digest_is_of_the_weights(run: Run, folder: Path, tmp_path: Path) -> None:
    digest = run.trajectory.attrs["run_digest"]
    again = brought(folder, tmp_path / "again", unchecked=True)
    assert again.trajectory.attrs["run_digest"] == digest
    for step in theirs.STEPS:
        state = state_of(folder, step)
        state["q_proj.weight"][0, 0] += step == 1000
        save_file(state, tmp_path / f"step-{step}.safetensors")
    other = brought(tmp_path, tmp_path / "other", unchecked=True)
    assert other.trajectory.attrs["run_digest"] != digest


def test_probes_work_on_it(run: Run) -> None:
    circuits = run.analyze("circuits")
    weights = run.state_dict(step=500, seed=0)
    kq = 6**-0.5 * weights["W_K"][0, 1].double() @ weights["W_Q"][0, 1].double().T
    np.testing.assert_allclose(circuits["KQ"].sel(step=500)[0, 0, 1], kq, atol=1e-12)
    assert np.isfinite(run.analyze("approximate_loss", n_prompts=50)["measured_loss"]).all()
    assert run.analyze("sign_matching", steps=[500]).sizes["step"] == 1
    since = run.analyze("training_stages")["since"]
    assert since.isnull().all() or int(since[0]) in theirs.STEPS


def test_it_is_not_resumed(run: Run) -> None:
    recipe = Recipe(name="x", task=run.task, model=run.recipe.model, n_steps=20_000)
    with pytest.raises(InputError, match="was imported: mechicl did not train it and has no"):
        train(recipe, Path(run.path), resume=True, compile=False)
    assert verify(Path(run.path)) == []


@pytest.mark.parametrize("steps", [(0,), (7,), (0, 1, 300), tuple(range(3, 600, 2))])
def test_any_increasing_steps_will_do(tmp_path: Path, steps: tuple[int, ...]) -> None:
    theirs.save_steps(theirs.StackedAttention, tmp_path / "c", steps)
    run = brought(tmp_path / "c", tmp_path / "run")
    assert run.steps.tolist() == list(steps)
    assert verify(Path(run.path)) == []
    assert run.analyze("sign_matching").sizes["step"] == len(steps)


# Other ways to write a model ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "recipe", "mapping", "skip"),
    [
        (theirs.TorchAttention, NARROW, "multihead_attention", ()),
        (lambda: theirs.TorchAttention(bias=True), NARROW, "multihead_attention", ("bias",)),
        (theirs.Gpt, CHAIN, "gpt2", GPT_BIASES),
        (theirs.Encoder, CHAIN, ENCODER, ("in_proj_bias", "out_proj.bias")),
    ],
)
def test_a_model_of_others(
    tmp_path: Path, make: Callable[[], Any], recipe: Recipe, mapping: Any, skip: tuple[str, ...]
) -> None:
    if recipe is NARROW:
        mapping = {"base": mapping, "parameters": NARROW_HEADS}
    modules = theirs.save_steps(make, tmp_path / "c", (500, 1000), skip=skip)
    told: list[str] = []
    run = brought(
        tmp_path / "c",
        tmp_path / "run",
        recipe=recipe,
        mapping=mapping,
        check=make(),
        notify=told.append,
    )
    checks = run.config["origin"]["check"]
    assert all(check["error"] < 1e-5 for check in checks["checkpoints"])
    assert checks["untested"] == []
    assert bool(skip) == any(text.startswith("dropped, all 0") for text in told)
    inputs = run.task.sample(10, seed=3)["inputs"].values
    hooked = run.model(step=1000, seed=0)(torch.from_numpy(inputs)).detach()
    hooked = hooked if recipe is CHAIN else hooked[:, -1, -1]
    np.testing.assert_allclose(hooked, theirs.outputs_of(modules[1000], inputs), atol=1e-4)


@pytest.mark.parametrize("recipe", [REGRESSION, CHAIN])
def test_a_hooked_transformers_own_state_dict(tmp_path: Path, recipe: Recipe) -> None:
    """It has zeros where the architecture has no parameter, and scores scaled as ours."""
    stream = torch.Generator().manual_seed(0)
    weights = recipe.model.initial(recipe.task, stream)
    hooked = recipe.model.hooked(recipe.task, weights)
    torch.save(hooked.state_dict(), tmp_path / "step_40.pt")
    run = brought(
        tmp_path, tmp_path / "run", recipe=recipe, mapping="transformer_lens", check=hooked
    )
    state = run.state_dict(step=40, seed=0)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


def test_what_mechicl_exports_comes_back_to_the_bit(run: Run, tmp_path: Path) -> None:
    for step in run.steps:
        run.export(tmp_path / f"{step}.safetensors", step=int(step), seed=0)
    again = brought(tmp_path, tmp_path / "run", mapping="mechicl", unchecked=True)
    xr.testing.assert_identical(again.params.load(), run.params.load())
    field = brought(tmp_path, tmp_path / "f", mapping="mechicl", unchecked=True, step_field="step")
    assert field.steps.tolist() == run.steps.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_wrapped_in_parts_and_in_half(tmp_path: Path, dtype: torch.dtype) -> None:
    def wrap(state: dict[str, torch.Tensor], step: int) -> Any:
        names = {f"module._orig_mod.{k}": v.to(dtype) for k, v in state.items()}
        return {"model": names, "step": step, "optimizer": {"state": {}}}

    theirs.save_steps(theirs.StackedAttention, tmp_path / "c", wrap=wrap, name="ck-{}.pt")
    run = brought(tmp_path / "c", tmp_path / "run", step_field="step")
    assert run.steps.tolist() == [*theirs.STEPS]
    assert run.params["W_Q"].dtype == np.float32


def test_seeds_from_folders(tmp_path: Path) -> None:
    for seed in (3, 1):
        theirs.save_steps(theirs.StackedAttention, tmp_path / "c" / f"seed{seed}", seed=seed)
    run = brought(tmp_path / "c", tmp_path / "run")
    assert run.seeds.tolist() == [1, 3]
    wanted = state_of(tmp_path / "c" / "seed3", 500)["k_proj.weight"].reshape(2, 6, 6).mT
    np.testing.assert_array_equal(run.params["W_K"].sel(seed=3, step=500)[0], wanted)
    folders = {8: tmp_path / "c" / "seed3", 2: tmp_path / "c" / "seed1"}
    assert brought(folders, tmp_path / "two").seeds.tolist() == [8, 2]


def test_losses_are_those_that_are_known(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("step,loss\n0,2.0\n700,1.5\n19999,0.5\n20000,9\n")
    told: list[str] = []
    run = brought(folder, tmp_path / "run", losses=tmp_path / "l.csv", notify=told.append)
    loss = run.metrics["loss"].sel(seed=0).dropna("log_step")
    assert dict(zip(loss["log_step"].values.tolist(), loss.values.tolist(), strict=True)) == {
        0: 2.0,
        700: 1.5,
        19_999: 0.5,
    }
    assert told == [
        "1 losses of step 20000 or later are left out: a run has those of steps before "
        "its last checkpoint"
    ]
    assert verify(Path(run.path)) == []


def test_a_seed_that_diverged(folder: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        for step in theirs.STEPS:
            state = state_of(folder, step)
            if seed == 1 and step > 500:
                state["v_proj.weight"][0, 0] = torch.nan
            target = tmp_path / "c" / f"seed{seed}" / f"{step}.pt"
            target.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, target)
    told: list[str] = []
    run = brought(tmp_path / "c", tmp_path / "run", notify=told.append)
    assert run.diverged() == {1: 500}
    assert told == [
        "seed 1 has NaN or infinities after step 500: it counts as diverged there, and "
        "its later checkpoints are NaN"
    ]
    assert np.isnan(run.params.sel(seed=1, step=1000).to_dataarray()).all()
    assert np.isfinite(run.params.sel(seed=1, step=500).to_dataarray()).all()
    assert verify(Path(run.path)) == []
    torch.save(state_of(folder, 20_000), tmp_path / "c" / "seed1" / "20000.pt")
    with pytest.raises(InputError, match=r"1000\.pt has NaN or infinities, and .*20000\.pt, of a"):
        brought(tmp_path / "c", tmp_path / "other")
    state = state_of(folder, 500)
    state["v_proj.weight"][0, 0] = torch.inf
    torch.save(state, tmp_path / "c" / "seed0" / "500.pt")
    torch.save(state, tmp_path / "c" / "seed0" / "1000.pt")
    torch.save(state, tmp_path / "c" / "seed0" / "20000.pt")
    torch.save(state_of(folder, 1000), tmp_path / "c" / "seed1" / "1000.pt")
    with pytest.raises(InputError, match=r"500\.pt, the first of its seed, has NaN or infinities"):
        brought(tmp_path / "c", tmp_path / "other")
    assert not (tmp_path / "other").exists()


# The forward pass ---------------------------------------------------------------------------------


def outputs_at(folder: Path, step: int, n: int = 30) -> dict[str, Any]:
    module = theirs.StackedAttention()
    module.load_state_dict(state_of(folder, step))
    inputs = REGRESSION.task.sample(n, seed=9)["inputs"].values
    return {"inputs": inputs, "outputs": theirs.outputs_of(module, inputs), "step": step}


def layouts(**rules: str) -> dict[str, Any]:
    return {"base": "linear", "parameters": {n: {"layout": text} for n, text in rules.items()}}


SQUARE = Recipe.model_validate(
    theirs.REGRESSION
    | {"model": {"name": "softmax_attention", "n_heads": 1, "score_scale": 6**-0.5}}
)


@pytest.mark.parametrize(
    ("make", "recipe", "right", "wrong", "hint"),
    [
        (
            lambda: theirs.StackedAttention(n_heads=1),
            SQUARE,
            "linear",
            layouts(W_Q="d_model (head d_head)", W_K="d_model (head d_head)"),
            "axes the other way round (W_Q: '(head d_head) d_model'; W_K: '(head d_head) d_model')",
        ),
        (
            lambda: theirs.StackedAttention(n_heads=1),
            SQUARE,
            "linear",
            layouts(W_O="(head d_head) d_model"),
            "axes the other way round (W_O: 'd_model (head d_head)')",
        ),
        (
            theirs.InterleavedAttention,
            REGRESSION,
            layouts(
                W_Q="(d_head head) d_model",
                W_K="(d_head head) d_model",
                W_V="(d_head head) d_model",
                W_O="d_model (d_head head)",
            ),
            "linear",
            "heads interleaved (W_Q: '(d_head head) d_model'; W_K:",
        ),
        (
            theirs.StackedAttention,
            REGRESSION,
            "linear",
            {
                "base": "linear",
                "parameters": {"W_Q": {"from": "k_proj.weight"}, "W_K": {"from": "q_proj.weight"}},
            },
            "W_Q and W_K exchanged",
        ),
        (
            theirs.TorchAttention,
            NARROW,
            {"base": "multihead_attention", "parameters": NARROW_HEADS},
            {
                "base": "multihead_attention",
                "parameters": NARROW_HEADS
                | {
                    "W_K": {"part": {"qkv": "2 of 3"}, "sizes": {"d_head": 3}},
                    "W_V": {"part": {"qkv": "1 of 3"}, "sizes": {"d_head": 3}},
                },
            },
            "the parts in the order W_Q, W_V, W_K",
        ),
        (
            theirs.Gpt,
            CHAIN,
            "gpt2",
            {
                "base": "gpt2",
                "parameters": {
                    n: {"layout": "d_model (head qkv d_head)"} for n in ("W_Q", "W_K", "W_V")
                },
            },
            "the parts of a fused matrix around the heads (W_Q: 'd_model (qkv head d_head)'; W_K:",
        ),
        (
            theirs.Gpt,
            CHAIN,
            "gpt2",
            {"base": "gpt2", "parameters": {"W_U": {"scale": 1.0}}},
            "scale temperature of W_U",
        ),
        (
            theirs.Gpt,
            CHAIN,
            "gpt2",
            {"base": "gpt2", "parameters": {"b_U": {"fill": 3.0}}},
            "nothing that is usually wrong would make it match",
        ),
    ],
)  # fmt: skip
def test_a_wrong_reshape_of_the_right_shape_is_caught(
    tmp_path: Path,
    make: Callable[[], Any],
    recipe: Recipe,
    right: Any,
    wrong: Any,
    hint: str,
) -> None:
    theirs.save_steps(make, tmp_path / "c", (500,), skip=GPT_BIASES)
    options = {"recipe": recipe, "check": make()}
    with pytest.raises(InputError, match="is not the same function: outputs of 64") as caught:
        brought(tmp_path / "c", tmp_path / "run", mapping=wrong, **options)
    assert hint in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert brought(tmp_path / "c", tmp_path / "run", mapping=right, **options).complete
    unseen = brought(tmp_path / "c", tmp_path / "u", mapping=wrong, recipe=recipe, unchecked=True)
    assert unseen.complete, "shapes alone say nothing"


def test_another_score_scale_is_caught_and_named(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"overrides": {"score_scale": 1.0}}
    with pytest.raises(InputError, match=r"score_scale 0\.408248 \(d_head\^-1/2\)"):
        brought(folder, tmp_path / "run", **options)


def test_outputs_in_a_file(folder: Path, tmp_path: Path) -> None:
    at = {step: outputs_at(folder, step) for step in theirs.STEPS}
    np.savez(tmp_path / "one.npz", **at[1000])
    tensors = {
        step: {k: torch.as_tensor(v).contiguous() for k, v in given.items()}
        for step, given in at.items()
    }
    torch.save(tensors[500] | {"step": 500}, tmp_path / "two.pt")
    save_file(tensors[20_000] | {"seed": torch.tensor(0)}, tmp_path / "three.safetensors")
    files = [tmp_path / name for name in ("one.npz", "two.pt", "three.safetensors")]
    run = brought(folder, tmp_path / "run", outputs=files)
    check = run.config["origin"]["check"]
    assert check["by"] == [str(file) for file in files]
    assert [each["step"] for each in check["checkpoints"]] == [*theirs.STEPS]
    together = {
        "inputs": at[500]["inputs"],
        "outputs": np.stack([at[step]["outputs"] for step in theirs.STEPS])[..., None],
        "step": np.array(theirs.STEPS),
        "seed": np.zeros(3),
    }
    many = brought(folder, tmp_path / "many", outputs=together)
    assert len(many.config["origin"]["check"]["checkpoints"]) == 3


def test_outputs_are_of_the_last_step_unless_they_say(folder: Path, tmp_path: Path) -> None:
    given = outputs_at(folder, 20_000)
    del given["step"]
    told: list[str] = []
    brought(folder, tmp_path / "run", outputs=given, notify=told.append)
    assert told == ["the outputs says no step, and was held against the last, 20000"]
    given = outputs_at(folder, 1000) | {"step": 500}
    with pytest.raises(
        InputError, match="the outputs: seed 0 at step 500 is not the same function"
    ):
        brought(folder, tmp_path / "other", outputs=given)


def test_all_that_the_model_gives_may_be_compared(folder: Path, run: Run, tmp_path: Path) -> None:
    inputs = run.task.sample(12, seed=1)["inputs"].values
    whole = run.model(step=500, seed=0)(torch.from_numpy(inputs)).detach()
    given = {"inputs": inputs, "outputs": whole, "step": 500}
    assert brought(folder, tmp_path / "run", outputs=given).complete
    whole[:, 0, 0] += 0.5
    with pytest.raises(InputError, match="the predictions match, and what is given elsewhere does"):
        brought(folder, tmp_path / "other", outputs=given)
    given["outputs"] = whole + 0.01 * torch.randn(whole.shape)
    with pytest.raises(InputError, match="differ by up to"):
        brought(folder, tmp_path / "other", outputs=given)
    assert brought(folder, tmp_path / "other", outputs=given, tolerance=0.9).complete


def test_what_outputs_do_not_depend_on_is_said(tmp_path: Path) -> None:
    """At the start of training a zero output projection hides whatever queries and keys are."""
    module = theirs.StackedAttention(n_heads=1)
    with torch.no_grad():
        module.o_proj.weight[-1] = 0.0
        module.o_proj.weight[-1, 0] = 1.0
        module.q_proj.weight.fill_(0.0)
    torch.save(module.state_dict(), tmp_path / "step-0.pt")
    told: list[str] = []
    options: dict[str, Any] = {"recipe": SQUARE, "check": module, "notify": told.append}
    run = brought(tmp_path, tmp_path / "run", **options)
    assert run.config["origin"]["check"]["untested"] == ["W_K"]
    assert told == [
        "the outputs that were compared do not depend on W_K, which are not checked; outputs at "
        "another step would tell"
    ]


def test_a_function_may_be_asked(folder: Path, tmp_path: Path) -> None:
    asked: list[set[str]] = []

    def check(state: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        asked.append(set(state))
        module = theirs.StackedAttention()
        return torch.func.functional_call(module, state, inputs)

    run = brought(folder, tmp_path / "run", check=check)
    assert run.config["origin"]["check"]["by"] == ["check"]
    assert asked == [set(theirs.StackedAttention().state_dict())] * 3


def test_the_users_module_is_left_as_it_is(folder: Path, tmp_path: Path) -> None:
    module = theirs.StackedAttention().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    brought(folder, tmp_path / "run", check=module)
    assert module.training
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)


INPUTS = REGRESSION.task.sample(4, seed=0)["inputs"].values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "an import is checked by a forward pass, for shapes do not tell a transposed matrix"),
        ({"check": torch.nn.Linear(2, 2), "unchecked": True}, "--unchecked goes without outputs"),
        ({"check": torch.nn.Linear(2, 2)}, "check 'Linear' at seed 0, step 500: Error.* in load"),
        ({"check": 7}, "check is a torch module, or a function of a state dict"),
        ({"check": theirs.StackedAttention}, "given the class StackedAttention, not one of it"),
        ({"check": lambda state, inputs: 1.0}, "4 inputs, and outputs of no batch"),
        (
            {"check": theirs.StackedAttention().double()},
            r"step 500 failed on prompts of shape \(64, 9, 6\), float32: RuntimeError: ",
        ),
        (
            {"check": lambda state, inputs: (inputs[:, 0, 0], inputs[0])},
            "what check '<lambda>' at seed 0, step 500 gives is no array of numbers, but tuple",
        ),
        (
            {"check": lambda state, inputs: inputs[:, 0, 0].double() * 1e200},
            "gives no finite numbers",
        ),
        ({"check": lambda state, inputs: None}, "gives no finite numbers, but NoneType"),
        ({"check": lambda state, inputs: inputs[:, 0] / 0}, "gives no finite numbers"),
        ({"check": lambda state, inputs: inputs[:, 0, 0] * 0}, "all outputs are the same"),
        ({"outputs": {"inputs": INPUTS}}, "the outputs has no outputs; it has inputs. It takes"),
        ({"outputs": 7}, "outputs are a file, or several; given 7"),
        ({"outputs": "gone.npz"}, "gone.npz cannot be read as .npz: No such file"),
        ({"outputs": "gone.pt"}, "gone.pt cannot be read: No such file"),
        (
            {"outputs": {"inputs": INPUTS[:, :3], "outputs": np.arange(4.0)}},
            r"inputs have shape \(4, 3, 6\), and prompts of task .* \(batch, 9, 6\)",
        ),
        ({"outputs": {"inputs": INPUTS, "outputs": np.arange(3.0)}}, "4 inputs, and outputs of 3"),
        (
            {"outputs": {"inputs": INPUTS, "outputs": np.arange(8.0).reshape(4, 2)}},
            r"outputs have shape \(4, 2\); model 'softmax_attention' predicts \(4,\)",
        ),
        (
            {"outputs": {"inputs": INPUTS, "outputs": np.full(4, np.nan)}},
            "outputs are not finite numbers",
        ),
        (
            # Of numbers as large the standard deviation is infinite, and nothing differs from them.
            {"outputs": {"inputs": INPUTS, "outputs": np.arange(4.0) * 1e200}},
            "outputs are not finite numbers that float32 has",
        ),
        (
            {"outputs": {"inputs": INPUTS.astype(float) * 1e300, "outputs": np.arange(4.0)}},
            "inputs are not finite numbers that float32 has",
        ),
        (
            {"outputs": {"inputs": INPUTS, "outputs": np.float32(3)}},
            "4 inputs, and outputs of no batch, one number",
        ),
        (
            {"outputs": {"inputs": INPUTS, "outputs": [[1.0], [1.0, 2.0]]}},
            "the outputs: outputs is no array of numbers, but list",
        ),
        (
            {"outputs": {"inputs": INPUTS, "outputs": np.ones((0, 4)), "step": np.zeros(0, int)}},
            r"one at least; given \(0,\) and \(0, 4\)",
        ),
        ({"outputs": iter([])}, "an import is checked by a forward pass"),
        (
            {"outputs": iter([{"inputs": INPUTS, "outputs": np.arange(4.0)}])},
            "is not the same function",
        ),
        (
            {"outputs": {"inputs": INPUTS, "outputs": np.arange(4.0), "step": 3}},
            "is of seed 0 at step 3; seeds are .0., steps 500, 1000, 20000",
        ),
        (
            {"outputs": {"inputs": INPUTS, "outputs": np.arange(4.0), "seed": 3}},
            "is of seed 3 at step 20000",
        ),
        (
            {"outputs": {"inputs": INPUTS, "outputs": np.arange(4.0), "step": 1.5}},
            "step is an integer; given",
        ),
        (
            {"outputs": {"inputs": INPUTS, "outputs": np.ones((2, 4)), "step": [1, 2, 3]}},
            r"as many as outputs has along its first axis, one at least; given \(3,\) and \(2, 4\)",
        ),
        ({"unchecked": True, "tolerance": 0}, "tolerance is between 0 and 1; given 0"),
        ({"unchecked": True, "tolerance": "1e-3"}, "tolerance is between 0 and 1; given '1e-3'"),
        ({"unchecked": True, "key": 5}, "key is text; given 5"),
        ({"unchecked": True, "step_field": 5}, "step_field is text; given 5"),
        ({"unchecked": True, "step_pattern": 5}, "step_pattern is text; given 5"),
        ({"unchecked": True, "step_field": "a", "step_pattern": "b"}, "give one of the two"),
        ({"unchecked": True, "key": "model"}, "has no state dict at 'model'"),
        ({"unchecked": True, "mapping": "gpt2"}, "there is no '.h.0.attn.c_attn.weight'"),
        ({"unchecked": True, "overrides": {"n_heads": 3}}, r"has shape \(12, 6\), and the layout"),
        ({"unchecked": True, "recipe": "he2025-two-hed"}, "there is no recipe"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_left(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"recipe": REGRESSION, "mapping": "linear"}
    with pytest.raises(InputError, match=message):
        mechicl.import_run(folder, tmp_path / "run", **settings | options)
    assert list(tmp_path.iterdir()) == []


def test_a_norm_in_between_is_another_function(tmp_path: Path) -> None:
    state = theirs.StackedAttention().state_dict() | {"norm.weight": torch.ones(6)}
    torch.save(state, tmp_path / "step-1.pt")
    with pytest.raises(
        InputError, match=r"norm\.weight: weights of a layer norm, which model 'softm"
    ):
        brought(tmp_path, tmp_path / "run", unchecked=True)


def test_probes_of_circuits_say_that_a_norm_is_between(tmp_path: Path) -> None:
    theirs.save_steps(theirs.Gpt, tmp_path / "c", skip=GPT_BIASES)
    options: dict[str, Any] = {"recipe": CHAIN, "mapping": "gpt2", "check": theirs.Gpt()}
    run = brought(tmp_path / "c", tmp_path / "run", **options)
    with pytest.raises(
        NothingToAnalyseError, match=r"its blocks have layer norms \(ln1_w, ln2_w\)"
    ):
        run.analyze("circuits")
    for name in ("length_generalization", "predictor_distance"):  # these multiply no weights
        assert "layer norms" not in str(run.objection(name))
    assert run.objection("attention_spans") is None
    assert run.analyze("value_alignment").sizes["step"] == 3


def test_files_that_differ_are_said_at_once(folder: Path, tmp_path: Path) -> None:
    for step in theirs.STEPS:
        state = state_of(folder, step)
        if step == 1000:
            del state["q_proj.weight"]
        if step != 1000:
            state["k_proj.weight"] = state["k_proj.weight"][:6]
        torch.save(state, tmp_path / f"step-{step}.pt")
    with pytest.raises(InputError) as caught:
        brought(tmp_path, tmp_path / "run", unchecked=True)
    assert "step-1000.pt does not fit" in str(caught.value)
    assert "step-500.pt (and so 1 more of the files) does not fit" in str(caught.value)
    assert "W_K: k_proj.weight has shape (6, 6)" in str(caught.value)


# The place ----------------------------------------------------------------------------------------


def test_a_run_that_is_there_stays_until_the_new_one_is_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = brought(folder, tmp_path / "run")
    first.save(first.analyze("sign_matching"))
    with pytest.raises(InputError, match=r"there is a run in .* replace it with --overwrite"):
        brought(folder, tmp_path / "run")

    theirs.save_steps(theirs.StackedAttention, tmp_path / "c", (1, 2, 3), seed=4)
    add = importing.TrajectoryWriter.add

    def stopped(self: Any, checkpoint: Any) -> None:
        add(self, checkpoint)
        raise KeyboardInterrupt

    monkeypatch.setattr(importing.TrajectoryWriter, "add", stopped)
    with pytest.raises(KeyboardInterrupt):
        brought(tmp_path / "c", tmp_path / "run", overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        brought(tmp_path / "c", tmp_path / "new")
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "run"]
    assert mechicl.open_run(tmp_path / "run").steps.tolist() == [*theirs.STEPS]
    assert len(list((tmp_path / "run" / "analyses").iterdir())) == 1

    second = brought(tmp_path / "c", tmp_path / "run", overwrite=True)
    assert second.steps.tolist() == [1, 2, 3]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml",
        "trajectory.zarr",
        ".lock",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "run"]


def test_a_run_that_is_there_is_no_beginning_of_an_import(run: Run, folder: Path) -> None:
    with pytest.raises(InputError, match=r"there is a run in .*; replace it with --overwrite, or"):
        brought(folder, Path(run.path), unchecked=True)


def test_a_run_that_is_being_written_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    brought(folder, tmp_path / "run")
    lock = claim.RunLock(tmp_path / "run")
    try:
        with pytest.raises(RunLockedError, match="is writing"):
            brought(folder, tmp_path / "run", overwrite=True)
    finally:
        lock.release()
    assert brought(folder, tmp_path / "run", overwrite=True).complete


def test_other_files_are_never_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="holds files that are not a run"):
        brought(folder, tmp_path / "run", overwrite=True)
    with pytest.raises(InputError, match="holds files that are not a run"):
        brought(folder, folder, overwrite=True)


def test_files_that_change_meanwhile_are_not_imported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    module = theirs.StackedAttention()

    def check(state: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        if state["q_proj.weight"].equal(state_of(folder, 20_000)["q_proj.weight"]):
            torch.save(state, tmp_path / "c" / "step-000500.pt")  # once all have been looked at
        module.load_state_dict(state)
        return module(inputs)

    with pytest.raises(MechiclError, match="files of weights changed while they were imported"):
        brought(tmp_path / "c", tmp_path / "run", check=check)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_full_disk_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mechicl.checkpoints.writer.save_arrays", full)
    with pytest.raises(
        MechiclError, match=r"cannot write .*: No space left on device; nothing was"
    ):
        brought(folder, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_no_run_and_what_it_leaves_goes(folder: Path, tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import mechicl
from mechicl.importers import importing
from tests.importers import theirs
from mechicl.training import Recipe
importing.TrajectoryWriter.add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
recipe = Recipe.model_validate(theirs.REGRESSION)
mechicl.import_run({str(folder)!r}, {str(tmp_path / "run")!r}, recipe=recipe, mapping="linear",
                   unchecked=True)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert len(list(tmp_path.glob(".run.new-*"))) == 1
    assert brought(folder, tmp_path / "run").complete
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# Damage -------------------------------------------------------------------------------------------


def found(path: Path) -> list[tuple[str, str, str | None]]:
    return [(finding.severity, finding.what, finding.array) for finding in verify(path)]


def test_damage_to_an_imported_run_is_found(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    brought(folder, path)
    trajectory = path / "trajectory.zarr"
    (trajectory / "step" / "c" / "0").unlink()
    assert ("damage", "missing", "step") in found(path)
    assert all(array == "step" for _, _, array in found(path)), "the recipe knows the steps"
    brought(folder, path, overwrite=True)
    (trajectory / "n_saved" / "c").unlink()
    assert found(path) == [("damage", "missing", "n_saved")], "it came whole"
    brought(folder, path, overwrite=True)
    chunk = trajectory / "W_Q" / "c" / "0" / "0" / "0" / "0" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[7] ^= 1
    chunk.write_bytes(data)
    assert found(path) == [("damage", "altered", "W_Q")]


def test_a_loss_that_is_infinite_is_damage_all_the_same(folder: Path, tmp_path: Path) -> None:
    import zarr

    path = tmp_path / "run"
    brought(folder, path)
    array = zarr.open_array(path / "trajectory.zarr" / "loss", mode="r+")
    array[0, 3] = np.inf
    assert found(path) == [("damage", "not_finite", "loss")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config["origin"].pop("files"), "the origin in .* is not what was written"),
        (lambda config: config.update(origin=None), "the origin in .* is not what was written"),
        (lambda config: config.pop("origin"), "config.yaml is not what was written"),
        (lambda config: config["recipe"].update(steps=[1, 2]), "is not the one that the run was"),
        (lambda config: config["recipe"].update(steps=[]), "config.yaml is not what was written"),
    ],
)
def test_a_config_that_was_altered_is_said(
    folder: Path, tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    brought(folder, tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(DamagedRunError, match=message):
        mechicl.open_run(tmp_path / "run").about()
