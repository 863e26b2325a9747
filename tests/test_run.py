"""The facade: opening, selecting, models, activations, analyses, saving."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mechicl
from mechicl import analyses
from mechicl.errors import InputError, MechiclError
from mechicl.run import Run
from mechicl.theory import linear_regression as theory


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
    moved = trained.trajectory.load().copy()
    moved["W_O"] = moved["W_O"] * 1.1
    moved["W_O"].attrs = trained.trajectory["W_O"].attrs
    before, after = probe(trained.trajectory), probe(moved)
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
    floor = theory.debiased_gd_risk(theory.optimal_learning_rate(**at(trained)), **at(trained))
    assert error < 0.005
    assert floor - 4 * error < loss < 1.05 * floor + 4 * error
    assert 0.2208 < result["approximate_loss"].sel(seed=0).item() < 0.24


@pytest.mark.parametrize("method", [None, "nearest"])
def test_model_is_the_stored_checkpoint(trained: Run, method: str | None) -> None:
    step = 1000 if method is None else 1013
    model = trained.model(step=step, seed=3, method=method)
    stored = trained.params.sel(seed=3, step=1000)
    for name in stored:
        ours = getattr(model.blocks[0].attn, str(name)).detach().numpy()
        np.testing.assert_array_equal(ours, stored[name].values[0])
    sample = trained.task.sample(50, seed=1)
    inputs = torch.from_numpy(sample["inputs"].values)
    with torch.no_grad():
        expected = model(inputs)[:, -1, -1].numpy()
    weights = {str(name): value.values[None, None] for name, value in stored.items()}
    predicted = trained.forward().predict(weights, sample["inputs"].values)
    np.testing.assert_allclose(predicted[0, 0], expected, rtol=1e-4, atol=1e-5)


def test_models_never_share_memory(trained: Run) -> None:
    first, second = (trained.model(step=2000, seed=0) for _ in range(2))
    first.blocks[0].attn.W_Q.data.zero_()
    assert second.blocks[0].attn.W_Q.abs().sum() > 0
    assert trained.model(step=2000, seed=0).blocks[0].attn.W_Q.abs().sum() > 0


def test_steps_and_seeds_that_are_not_stored(trained: Run) -> None:
    with pytest.raises(InputError, match=r"1013 is not stored; its neighbours are 1000 and 1050"):
        trained.model(step=1013, seed=0)
    with pytest.raises(InputError, match=r"neighbours are 2000 \("):
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
    cached = trained.cache(names, prompts=prompts, steps=[0, 2000], seeds=[3])
    assert cached[names[0]].dims == ("seed", "step", "batch", "head", "query_pos", "key_pos")
    assert cached[names[1]].dims == ("seed", "step", "batch", "pos", "head", "d_head")
    assert cached["step"].values.tolist() == [0, 2000]
    model = trained.model(step=2000, seed=3)
    with torch.no_grad():
        _, expected = model.run_with_cache(torch.from_numpy(prompts["inputs"].values))
    for name in names:
        np.testing.assert_array_equal(cached[name].sel(seed=3, step=2000), expected[name])
    assert not cached[names[0]].sel(step=0).equals(cached[names[0]].sel(step=2000))


def test_cache_refusals(trained: Run) -> None:
    prompts = trained.task.sample(5, seed=0)
    with pytest.raises(InputError, match=r"did you mean 'blocks\.0\.attn\.hook_pattern'"):
        trained.cache("blocks.0.attn.hook_patern", prompts=prompts)
    with pytest.raises(InputError, match="do not fire"):
        trained.cache("hook_embed", prompts=prompts)
    with pytest.raises(InputError, match="above the limit of"):
        trained.cache("blocks.0.attn.hook_pattern", prompts=prompts, limit=1000)


def test_analyze_refuses_before_it_reads(trained: Run) -> None:
    with pytest.raises(InputError, match="did you mean 'sign_matching'"):
        trained.analyze("sign_machting")
    with pytest.raises(InputError, match="there is no setting 'tolerance'"):
        trained.analyze("sign_matching", tolerance=1)
    with pytest.raises(InputError, match="less than 1"):
        trained.analyze("sign_matching", dummy_threshold=2)


def test_selection_is_kept_and_recorded(trained: Run) -> None:
    result = trained.analyze("sign_matching", steps=[1000, 2000], seeds=[3])
    assert (result.sizes["seed"], result.sizes["step"]) == (1, 2)
    assert json.loads(result.attrs["selection"]) == {"steps": [1000, 2000], "seeds": [3]}
    whole = trained.analyze("sign_matching")
    chosen = whole["sign_agreement"].sel(step=[1000, 2000], seed=[3])
    np.testing.assert_array_equal(result["sign_agreement"], chosen)


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


def test_every_probe_round_trips_through_the_store(run_copy: Path) -> None:
    run = mechicl.open_run(run_copy)
    checked = 0
    for name in analyses.names():
        result = run.analyze(name, **({"n_prompts": 200} if name == "approximate_loss" else {}))
        (path,) = run.save(result, figure=False)
        xr.testing.assert_identical(xr.open_zarr(path).load(), result)
        checked += 1
    assert checked == len(analyses.names()) >= 7


def test_a_failed_save_keeps_the_old_result(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mechicl.open_run(run_copy)
    result = run.analyze("zero_sum_ov")
    (path,) = run.save(result, figure=False)

    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_zarr", disk_full)
    with pytest.raises(MechiclError, match="No space left on device"):
        run.save(result, figure=False)
    monkeypatch.undo()
    xr.testing.assert_identical(xr.open_zarr(path).load(), result)
