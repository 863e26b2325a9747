"""The facade: opening, selecting, models, activations, analyses, saving."""

import json
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import yaml
from safetensors import safe_open

import mechicl
from mechicl import analyses
from mechicl.errors import DamagedRunError, InputError, MechiclError
from mechicl.run import Run
from mechicl.theory import exact_risk
from mechicl.theory import linear_regression as theory
from mechicl.training import load_recipe, settings_digest


def at(run: Run) -> dict[str, float]:
    task = run.task
    return {"d": task.d, "n_context": task.n_context, "noise_variance": task.noise_variance}


def test_what_a_run_says_of_itself(trained: Run) -> None:
    run = mechicl.open_run(trained.path)
    assert run.complete
    assert run.steps[0] == 0
    assert run.steps[-1] == 2000
    assert run.seeds.tolist() == [0, 3]
    assert set(run.params) == {"W_Q", "W_K", "W_V", "W_O"}
    assert run.params["W_Q"].dims == ("seed", "step", "layer", "head", "d_model", "d_head")
    assert set(run.metrics) == {"loss", "diverged_at"}
    assert run.config["versions"]["mechicl"] == mechicl.__version__
    assert run.task.sample(3, seed=0)["inputs"].shape == (3, 41, 6)
    assert "he2025-two-head-quick, 2 seeds" in repr(run)


def test_parameters_are_lazy(trained: Run) -> None:
    run = mechicl.open_run(trained.path)
    assert not run.params["W_Q"].variable._in_memory
    assert not run.metrics["loss"].variable._in_memory


def test_plain_xarray_opens_the_store(trained: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = xr.open_zarr(Path(trained.path) / "trajectory.zarr")
    assert dataset["W_O"].dims == ("seed", "step", "layer", "head", "d_head", "d_model")
    assert all("units" in variable.attrs for variable in dataset.variables.values())


def test_a_seed_reaches_the_manifold_and_one_does_not(trained: Run) -> None:
    """he2025 Observation 2 on a run of our own: η of the measured (ω, μ) within 3 % of η*."""
    result = trained.analyze("solution_manifold")
    assert result["since"].sel(seed=0) <= 1000
    assert np.isnan(result["since"].sel(seed=3))
    assert (result["holds"].sel(seed=3) == 0).all()
    late = result["eta"].sel(seed=0).isel(step=slice(-10, None))
    assert late.mean().item() == pytest.approx(
        theory.optimal_learning_rate(**at(trained)), rel=0.03
    )
    roles = trained.analyze("head_roles")
    assert roles["holds"].sel(seed=0)[-1] == 1
    assert roles["holds"].sel(seed=3)[-1] == 0


def test_measured_mu_moved_by_a_tenth_is_caught(trained: Run) -> None:
    """The verdict is about what was measured: scaling W_O by 1.1 scales μ and nothing else."""
    probe = analyses.get("solution_manifold")
    trajectory = mechicl.open_run(trained.path).trajectory.load()
    moved = trajectory.assign(W_O=(trajectory["W_O"] * 1.1).assign_attrs(trajectory["W_O"].attrs))
    before, after = probe(trajectory), probe(moved)
    assert before["holds"].sel(seed=0)[-10:].all()
    assert not after["holds"].sel(seed=0)[-10:].any()
    np.testing.assert_allclose(after["eta"], 1.1 * before["eta"], rtol=1e-6)


def test_measured_loss_and_its_approximation(trained: Run) -> None:
    """The floor of the loss is 0.243, that of its approximation 0.221; seed 0 is near both."""
    result = trained.analyze("approximate_loss", n_prompts=20_000, n_steps=3).isel(step=-1)
    loss, error = (
        result["measured_loss"].sel(seed=0).item(),
        result["measured_error"].sel(seed=0).item(),
    )
    floor = exact_risk.debiased_gd_risk(theory.optimal_learning_rate(**at(trained)), **at(trained))
    assert error < 0.005
    assert floor - 4 * error < loss < 1.05 * floor + 4 * error
    assert 0.2208 < result["approximate_loss"].sel(seed=0).item() < 0.24


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("asked", "method", "step"),
    [(1000, None, 1000), (1013, "nearest", 1000), (1049, "nearest", 1050)],
)
def test_model_is_the_stored_checkpoint(
    trained: Run, seed: int, asked: int, method: str | None, step: int
) -> None:
    model = trained.model(step=asked, seed=seed, method=method)
    stored = trained.params.sel(seed=seed, step=step)
    for name in stored:
        ours = getattr(model.blocks[0].attn, str(name)).detach().numpy()
        np.testing.assert_array_equal(ours, stored[name].values[0])
    sample = trained.task.sample(50, seed=1)
    inputs = torch.from_numpy(sample["inputs"].values)
    with torch.no_grad():
        expected = trained.recipe.model.answers(trained.task, model(inputs)).numpy()
    weights = {str(name): value.values[None, None] for name, value in stored.items()}
    predicted = trained.forward().predict(weights, sample["inputs"].values)
    np.testing.assert_allclose(predicted[0, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "nearest"), [(1013, 1000), (1049, 1050), (1000, 1000), (9999, 2000), (-5, 0)]
)
def test_nearest_is_on_either_side(trained: Run, asked: int, nearest: int) -> None:
    assert trained.select([asked], method="nearest")["step"].values.tolist() == [nearest]


def test_models_never_share_memory(trained: Run) -> None:
    first, second = (trained.model(step=2000, seed=0) for _ in range(2))
    first.blocks[0].attn.W_Q.data.zero_()
    assert (first.blocks[0].attn.W_Q == 0).all(), "zeroing reached nothing"
    assert second.blocks[0].attn.W_Q.abs().sum() > 0
    assert trained.model(step=2000, seed=0).blocks[0].attn.W_Q.abs().sum() > 0


def test_steps_and_seeds_that_are_not_stored(trained: Run) -> None:
    with pytest.raises(InputError, match=r"1013 is not stored; its neighbours are 1000 and 1050"):
        trained.model(step=1013, seed=0)
    with pytest.raises(InputError, match=r"2001 is not stored; its neighbour is 2000$"):
        trained.model(step=2001, seed=0)
    with pytest.raises(InputError, match=r"no seed 1; it has \[0, 3\]"):
        trained.model(step=1000, seed=1)
    with pytest.raises(InputError, match="'nearest'"):
        trained.model(step=1013, seed=0, method="ffill")
    with pytest.raises(InputError, match="is not stored"):
        trained.analyze("sign_matching", steps=[7_777])


def test_hooks_change_a_checkpoints_output(trained: Run) -> None:
    model = trained.model(step=2000, seed=0)
    inputs = torch.from_numpy(trained.task.sample(20, seed=0)["inputs"].values)

    def without_head_0(value: torch.Tensor, hook: object) -> torch.Tensor:
        value[:, :, 0] = 0
        return value

    ablated = model.run_with_hooks(inputs, fwd_hooks=[("blocks.0.attn.hook_z", without_head_0)])
    assert (ablated - model(inputs))[:, -1, -1].abs().max() > 0.01


def test_cache_is_what_run_with_cache_gives(trained: Run) -> None:
    prompts = trained.task.sample(5, seed=0)
    names = ["blocks.0.attn.hook_pattern", "blocks.0.attn.hook_z"]
    cached = trained.cache(names, prompts=prompts, steps=[0, 1000, 2000], seeds=[3, 0])
    assert cached[names[0]].dims == ("seed", "step", "batch", "head", "query_pos", "key_pos")
    assert cached[names[1]].dims == ("seed", "step", "batch", "pos", "head", "d_head")
    assert (cached["seed"].values.tolist(), cached["step"].values.tolist()) == (
        [3, 0],
        [0, 1000, 2000],
    )
    inputs, checked = torch.from_numpy(prompts["inputs"].values), 0
    for seed in (0, 3):
        for step in (0, 1000, 2000):
            with torch.no_grad():
                _, expected = trained.model(step=step, seed=seed).run_with_cache(inputs)
            for name in names:
                np.testing.assert_array_equal(
                    cached[name].sel(seed=seed, step=step), expected[name]
                )
                checked += 1
    assert checked == 12
    assert not cached[names[0]].sel(step=0).equals(cached[names[0]].sel(step=2000))


def test_the_limit_of_the_cache_is_in_bytes(trained: Run) -> None:
    prompts, name = trained.task.sample(5, seed=0), "blocks.0.attn.hook_pattern"
    chosen = {"prompts": prompts, "steps": [0], "seeds": [0]}
    size = 4 * 5 * 2 * 41 * 41
    assert trained.cache(name, limit=size, **chosen)[name].nbytes == size
    with pytest.raises(InputError, match="above the limit"):
        trained.cache(name, limit=size - 1, **chosen)


def test_the_order_of_the_prompts_dims_does_not_matter(trained: Run) -> None:
    prompts, name = trained.task.sample(5, seed=0), "blocks.0.attn.hook_z"
    chosen = {"steps": [2000], "seeds": [0]}
    turned = prompts.transpose("pos", "batch", "d_model")
    assert turned["inputs"].dims != prompts["inputs"].dims
    xr.testing.assert_identical(
        trained.cache(name, prompts=turned, **chosen),
        trained.cache(name, prompts=prompts, **chosen),
    )


def prompts_that_are_none(kind: str, prompts: xr.Dataset) -> object:
    return {
        "array": prompts["inputs"].values,
        "DataArray": prompts["inputs"],
        "no inputs": prompts.drop_vars("inputs"),
        "other dims": prompts.rename(pos="token"),
        "one prompt": prompts.isel(batch=0),
        "no prompts": prompts.isel(batch=slice(0)),
        "other width": prompts.isel(d_model=slice(3)),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["array", "DataArray", "no inputs", "other dims", "one prompt", "no prompts", "other width"],
)
def test_prompts_that_are_none_are_refused(trained: Run, kind: str) -> None:
    given = prompts_that_are_none(kind, trained.task.sample(5, seed=0))
    with pytest.raises(InputError, match=r"prompts are a Dataset|reads continuous inputs"):
        trained.cache("blocks.0.attn.hook_z", prompts=given, steps=[0], seeds=[0])


def test_scores_are_those_of_the_kq_circuit(tmp_path: Path) -> None:
    """Store, probe and hook points agree on orientation and on the scale of scores."""
    settings = {"d": 2, "n_context": 5, "batch_size": 8, "n_steps": 20, "score_scale": 0.4}
    run = mechicl.train(
        "he2025-two-head-quick",
        tmp_path / "run",
        compile=False,
        overrides=settings | {"seeds": [1]},
    )
    assert run.trajectory["score_scale"] == pytest.approx(0.4)
    prompts = run.task.sample(4, seed=0)
    name = "blocks.0.attn.hook_attn_scores"
    scores = run.cache(name, prompts=prompts, steps=[20])[name]
    scores = scores.isel(query_pos=-1, key_pos=slice(-1))
    kq = run.analyze("circuits", steps=[20])["KQ"].isel(layer=0, drop=True)
    keys = prompts["inputs"].isel(pos=slice(-1)).rename(pos="key_pos", d_model="d_key")
    query = prompts["inputs"].isel(pos=-1).rename(d_model="d_query")
    expected = xr.dot(keys, kq, query, dim=("d_key", "d_query")).transpose(*scores.dims)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(scores, expected / 0.4, rtol=1e-2)


def test_cache_refusals(trained: Run) -> None:
    prompts = trained.task.sample(5, seed=0)
    with pytest.raises(InputError, match=r"did you mean 'blocks\.0\.attn\.hook_pattern'"):
        trained.cache("blocks.0.attn.hook_patern", prompts=prompts)
    with pytest.raises(InputError, match="do not fire"):
        trained.cache("hook_embed", prompts=prompts)


def test_analyze_refuses_before_it_reads(trained: Run) -> None:
    with pytest.raises(InputError, match="did you mean 'sign_matching'"):
        trained.analyze("sign_machting")
    with pytest.raises(InputError, match="there is no setting 'tolerance'"):
        trained.analyze("sign_matching", tolerance=1)
    with pytest.raises(InputError, match="less than 1"):
        trained.analyze("sign_matching", dummy_threshold=2)


def test_selected_steps_and_seeds_are_those_of_the_whole(trained: Run) -> None:
    whole = trained.analyze("sign_matching")
    result = trained.analyze("sign_matching", steps=[1000, 2000], seeds=[3])
    assert result["step"].values.tolist() == [1000, 2000]
    assert result["seed"].values.tolist() == [3]
    for name in ("sign_agreement", "holds", "undefined"):
        np.testing.assert_array_equal(result[name], whole[name].sel(step=[1000, 2000], seed=[3]))


@pytest.mark.parametrize("steps", [[2000], [0, 2000], [0], 1000])
def test_since_is_of_the_whole_run_whichever_steps_are_chosen(
    trained: Run, steps: int | list[int]
) -> None:
    whole = trained.analyze("solution_manifold")
    assert 0 < whole["since"].sel(seed=0) < 1000
    chosen = trained.analyze("solution_manifold", steps=steps)
    np.testing.assert_array_equal(chosen["since"], whole["since"])
    np.testing.assert_array_equal(chosen["holds"], whole["holds"].sel(step=np.atleast_1d(steps)))
    one = trained.analyze("solution_manifold", steps=steps, seeds=0)
    np.testing.assert_array_equal(one["since"], whole["since"].sel(seed=[0]))
    counted = sum(json.loads(chosen.attrs["n_undefined"]).values())
    assert counted == (chosen["undefined"].values != 0).sum()


@pytest.mark.parametrize("statement", ["as it is", None])
def test_peaks_are_of_the_whole_run_whichever_steps_are_chosen(
    trained: Run, monkeypatch: pytest.MonkeyPatch, statement: str | None
) -> None:
    """Also of a probe that has no statement."""
    record = analyses.get("training_stages")
    if statement is None:
        record = replace(record, statement=None)
        monkeypatch.setattr(analyses, "get", lambda name: record)
    whole = trained.analyze("training_stages")
    chosen = trained.analyze("training_stages", steps=[0, 1000])
    assert chosen["step"].values.tolist() == [0, 1000]
    once = [name for name, var in record.gives.items() if var.dims == ("seed",)]
    assert len(once) == 10
    for name in once:
        xr.testing.assert_identical(chosen[name], whole[name])
    assert (whole["peak_step"] > 0).any() and not (whole["peak_step"] == 1000).all()
    xr.testing.assert_identical(chosen["gamma"], whole["gamma"].sel(step=[0, 1000]))


def test_steps_come_back_increasing_and_once(trained: Run) -> None:
    for given in ([2000, 0, 1000, 0], (2000, 1000, 0), np.array([1000, 2000, 0])):
        result = trained.analyze("circuits", steps=given, seeds=[3, 0, 3])
        assert result["step"].values.tolist() == [0, 1000, 2000]
        assert result["seed"].values.tolist() == [3, 0]
    one = trained.analyze("circuits", steps=1000, seeds=np.int64(3))
    assert (one["step"].values.tolist(), one["seed"].values.tolist()) == ([1000], [3])


@pytest.mark.parametrize("what", ["steps", "seeds"])
@pytest.mark.parametrize(
    "given", [[], (), "0", [0.0], [0.5], slice(0, 2), True, [False], [None], 0.0], ids=repr
)
def test_what_is_no_list_of_integers_is_refused(trained: Run, what: str, given: object) -> None:
    with pytest.raises(InputError, match=what):
        trained.analyze("circuits", **{what: given})
    with pytest.raises(InputError, match=what):
        trained.select(**{what: given})


def test_results_are_saved_by_probe_and_parameters(run_copy: Path) -> None:
    run = mechicl.open_run(run_copy)
    one = run.save(run.analyze("zero_sum_ov"))
    two = run.save(run.analyze("zero_sum_ov", tolerance=0.5))
    again = run.save(run.analyze("zero_sum_ov"))
    assert one == again
    assert not set(one) & set(two)
    assert [path.suffix for path in one] == [".zarr", ".png"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = xr.open_zarr(one[0])
    xr.testing.assert_identical(stored.load(), run.analyze("zero_sum_ov"))
    assert one[1].read_bytes().startswith(b"\x89PNG")
    assert not list(run_copy.glob("analyses/.*"))


def test_results_of_other_selections_are_other_files(run_copy: Path) -> None:
    run = mechicl.open_run(run_copy)
    asked = ({}, {"steps": [2000]}, {"steps": [1000]}, {"seeds": [3]}, {"tolerance": 0.5})
    results = [run.analyze("zero_sum_ov", **each) for each in asked]
    results.append(results[0].isel(step=slice(0, 3)))
    paths = [run.save(result, figure=False)[0] for result in results]
    assert len(set(paths)) == len(results) == 6
    for path, result in zip(paths, results, strict=True):
        xr.testing.assert_identical(xr.open_zarr(path).load(), result)


def test_results_of_two_runs_in_one_place_are_two_files(trained: Run, tmp_path: Path) -> None:
    other = mechicl.train(
        "he2025-two-head-quick",
        tmp_path / "other",
        overrides={"n_steps": 5, "seeds": [0, 3]},
        compile=False,
    )
    results = [run.analyze("zero_sum_ov") for run in (trained, other)]
    paths = [
        run.save(result, out=tmp_path / "results", figure=False)[0]
        for run, result in zip((trained, other), results, strict=True)
    ]
    assert paths[0] != paths[1]
    assert {path.parent for path in paths} == {tmp_path / "results" / "analyses"}
    for path, result in zip(paths, results, strict=True):
        xr.testing.assert_identical(xr.open_zarr(path).load(), result)


@pytest.mark.parametrize("out", ["memory://x", "s3://bucket/run", "", "a\0b", "x" * 300])
def test_only_local_directories_are_written(trained: Run, out: str) -> None:
    result = trained.analyze("zero_sum_ov", steps=[2000])
    with pytest.raises(InputError):
        trained.save(result, out=out, figure=False)
    with pytest.raises(InputError):
        mechicl.train("he2025-two-head-quick", out, overrides={"n_steps": 1}, compile=False)


def test_overrides_are_laid_over_a_recipe_too(tmp_path: Path) -> None:
    recipe = load_recipe("he2025-two-head-quick", {"d": 2, "n_context": 3, "batch_size": 4})
    run = mechicl.train(
        recipe, tmp_path / "run", overrides={"n_steps": 3, "seeds": [7]}, compile=False
    )
    assert (run.task.d, run.recipe.n_steps, run.seeds.tolist()) == (2, 3, [7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config["recipe"]["task"].update(noise_variance=0.2), ""),
        (lambda config: config["recipe"]["task"].update(name="sorting"), "sorting"),
        (lambda config: config["recipe"].update(colour="red"), "colour"),
        (lambda config: config.pop("recipe"), "recipe"),
        (lambda config: config.update(recipe=None), ""),
    ],
    ids=["edited", "unknown task", "unknown key", "no recipe", "empty recipe"],
)
def test_another_config_is_refused(run_copy: Path, change: object, message: str) -> None:
    path = run_copy / "config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config))
    mechicl.open_run(run_copy)
    change(config)  # type: ignore[operator]
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(DamagedRunError, match=rf"config\.yaml.*{message}"):
        mechicl.open_run(run_copy)


def test_every_probe_round_trips_through_the_store(run_copy: Path) -> None:
    run = mechicl.open_run(run_copy)
    checked = 0
    names = [name for name in analyses.names() if run.objection(name) is None]
    for name in names:
        few = "n_prompts" in analyses.get(name).parameters.model_fields
        result = run.analyze(name, **({"n_prompts": 200} if few else {}))
        (path,) = run.save(result, figure=False)
        xr.testing.assert_identical(xr.open_zarr(path).load(), result)
        checked += 1
    assert checked == len(names) >= 9


def test_a_save_cut_short_keeps_the_old_result(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the middle: some files of the new result have been written."""
    run = mechicl.open_run(run_copy)
    result = run.analyze("zero_sum_ov")
    (path,) = run.save(result, figure=False)
    to_zarr = xr.Dataset.to_zarr

    def disk_full(self: xr.Dataset, *arguments: object, **settings: object) -> None:
        to_zarr(self * 0, *arguments, **settings)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_zarr", disk_full)
    with pytest.raises(MechiclError, match="No space left on device"):
        run.save(result, figure=False)
    monkeypatch.undo()
    xr.testing.assert_identical(xr.open_zarr(path).load(), result)
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing is left behind"


def test_a_forward_probe_with_a_verdict_evaluates_the_steps_that_are_asked_for(
    trained: Run,
) -> None:
    settings = {"lengths": (40, 100), "n_prompts": 400}
    last = trained.analyze("length_generalization", **settings)
    assert last["step"].values.tolist() == [2000]
    assert last["holds"].values.tolist() == [[1], [1]]
    first = trained.analyze("length_generalization", steps=[0], n_steps=5, **settings)
    assert first["step"].values.tolist() == [0]
    two = trained.analyze("length_generalization", steps=[2000, 0], n_steps=5, **settings)
    assert two["step"].values.tolist() == [0, 2000]
    for step, one in ((0, first), (2000, last)):
        np.testing.assert_array_equal(two["loss"].sel(step=step), one["loss"].sel(step=step))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of a few updates: of attention, of pooling, and one whose seeds diverge."""
    root = tmp_path_factory.mktemp("small")
    vectors = {"d": 2, "n_context": 5, "batch_size": 8, "seeds": [0, 3]}
    chosen = {
        "attention": ("he2025-two-head-quick", vectors | {"n_steps": 20}),
        "pooled": ("raj2026-tree-deep", {"depth": 2, "n_layers": 2, "n_context": 8} | {
            "n_queries": 2, "batch_size": 4, "n_steps": 2, "seeds": [0], "checkpoints.every": 1,
        }),
        "diverging": ("he2025-two-head-quick", vectors | {
            "n_steps": 40, "optimizer.name": "sgd", "learning_rate": 1e3,
        }),
    }  # fmt: skip
    return {
        name: mechicl.train(recipe, root / name, overrides=overrides, compile=False)
        for name, (recipe, overrides) in chosen.items()
    }


def plainly(run: Run, step: int, seed: int) -> dict[str, np.ndarray]:
    """Parameters of a checkpoint as plain xarray reads them from the store."""
    stored = xr.open_zarr(Path(run.path) / "trajectory.zarr").sel(step=step, seed=seed)
    return {
        str(name): stored[name].values
        for name in stored.data_vars
        if stored[name].dtype == np.float32 and "log_step" not in stored[name].dims
    }


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    kinds = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return kinds and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("name", "step", "seed"), [("attention", 20, 3), ("pooled", 2, 0)])
def test_state_dict_is_the_stored_checkpoint(
    small: dict[str, Run], name: str, step: int, seed: int
) -> None:
    run = small[name]
    state, stored = run.state_dict(step=step, seed=seed), plainly(run, step, seed)
    assert set(state) == set(stored) == set(run.params)
    assert all(same_bits(state[key].numpy(), stored[key]) for key in stored)
    early = run.state_dict(step=0, seed=seed)
    assert not any(torch.equal(early[key], state[key]) for key in ("W_Q", "W_V"))
    first, second = run.state_dict(step=step, seed=seed), run.state_dict(step=step, seed=seed)
    first["W_V"].zero_()
    assert torch.equal(second["W_V"], state["W_V"]), "no memory is shared"
    nearest = run.state_dict(step=step + 100, seed=seed, method="nearest")
    assert torch.equal(nearest["W_V"], state["W_V"])


def test_a_model_can_be_made_of_a_state_dict(small: dict[str, Run]) -> None:
    run = small["pooled"]
    state = run.state_dict(step=2, seed=0)
    inputs = torch.from_numpy(run.task.sample(3, seed=0)["inputs"].values)
    with torch.no_grad():
        ours = run.model(step=2, seed=0)(inputs)
        torch.testing.assert_close(run.recipe.model.hooked(run.task, state)(inputs), ours)
        torch.testing.assert_close(run.recipe.model.predict(run.task, state, inputs), ours)


def test_one_checkpoint_is_one_step_and_one_seed(small: dict[str, Run]) -> None:
    run = small["attention"]
    for given in ({"step": [0, 20], "seed": 0}, {"step": 20, "seed": [0, 3]}):
        with pytest.raises(InputError, match="is an integer"):
            run.state_dict(**given)
        with pytest.raises(InputError, match="is an integer"):
            run.model(**given)


def test_a_diverged_seed_has_no_checkpoint_after(small: dict[str, Run], tmp_path: Path) -> None:
    run = small["diverging"]
    at = run.diverged()[0]
    said = f"seed 0 diverged at step {at}; it has no model at step 40"
    for ask in (run.model, run.state_dict):
        with pytest.raises(MechiclError, match=said):
            ask(step=40, seed=0)
        with pytest.raises(MechiclError, match=said):
            ask(step=99, seed=0, method="nearest")
        assert ask(step=0, seed=0), "before that it has one"
    with pytest.raises(MechiclError, match=said):
        run.export(tmp_path / "one.safetensors", step=40, seed=0)
    assert not list(tmp_path.iterdir())


def test_what_is_not_finite_without_divergence_is_damage(small: dict[str, Run]) -> None:
    run = mechicl.open_run(small["diverging"].path)
    run.trajectory["diverged_at"] = run.trajectory["diverged_at"] * np.nan
    with pytest.raises(DamagedRunError, match=r"not finite.*did not diverge.*mechicl verify"):
        run.state_dict(step=40, seed=0)


@pytest.mark.parametrize(("name", "step", "seed"), [("attention", 20, 3), ("pooled", 2, 0)])
def test_an_export_has_the_same_bits(
    small: dict[str, Run], tmp_path: Path, name: str, step: int, seed: int
) -> None:
    """Read by safetensors alone, and held against the store as plain xarray reads it."""
    run = small[name]
    written = run.export(tmp_path / "new" / "one.safetensors", step=step, seed=seed)
    assert [path.name for path in written.parent.iterdir()] == ["one.safetensors"]
    stored = plainly(run, step, seed)
    with safe_open(written, framework="numpy") as file:
        assert set(file.keys()) == set(stored)
        assert all(same_bits(file.get_tensor(key), stored[key]) for key in stored)
        metadata = file.metadata()
    assert (metadata["step"], metadata["seed"]) == (str(step), str(seed))
    assert metadata["run_digest"] == run.trajectory.attrs["run_digest"]
    assert metadata["mechicl_version"] == mechicl.__version__
    recipe = json.loads(metadata["recipe"])
    assert settings_digest(recipe) == metadata["run_digest"]
    assert recipe["task"]["n_context"] == run.task.n_context
    dims = {key: ("seed", "step", *each) for key, each in json.loads(metadata["dims"]).items()}
    assert dims == {str(key): value.dims for key, value in run.params.items()}
    other = run.export(tmp_path / "other.safetensors", step=0, seed=seed)
    with safe_open(other, framework="numpy") as file:
        assert not same_bits(file.get_tensor("W_V"), stored["W_V"])


def test_an_export_cut_short_keeps_the_old_file(
    small: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, target = small["attention"], tmp_path / "one.safetensors"
    before = run.export(target, step=0, seed=0).read_bytes()

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", disk_full)
        with pytest.raises(MechiclError, match=r"cannot write .*No space left on device"):
            run.export(target, step=20, seed=0, overwrite=True)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target], "nothing is left behind"
    assert run.export(target, step=20, seed=0, overwrite=True).read_bytes() != before


def test_the_optimiser_state_of_a_run_is_not_overwritten(
    small: dict[str, Run], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(small["attention"].path, copy)
    (state,) = copy.glob("resume-*.safetensors")
    before = state.read_bytes()
    run = mechicl.open_run(copy)
    for target in (state, copy / "resume-7.safetensors"):
        with pytest.raises(InputError, match="keeps its optimiser state"):
            run.export(target, step=20, seed=0, overwrite=True)
    assert state.read_bytes() == before
    run.export(tmp_path / "resume-7.safetensors", step=20, seed=0)
    run.export(copy / "step-20.safetensors", step=20, seed=0)
