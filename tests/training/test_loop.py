"""Training end to end: what is stored, resuming to the same bits, refusals, divergence."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import mechicl
from mechicl.checkpoints import read_trajectory
from mechicl.errors import InputError
from mechicl.run import open_run
from mechicl.training import load_recipe
from mechicl.training.loop import Progress, train

QUICK = "he2025-two-head-quick"
SMALL = {
    "d": 2,
    "n_context": 5,
    "batch_size": 16,
    "n_steps": 120,
    "seeds": [3, 5, 8],
    "every": 10,
    "learning_rate": 0.01,
}


def stored(path: Path) -> dict[str, np.ndarray]:
    return {str(k): v.values for k, v in read_trajectory(path).variables.items()}


def assert_same_bits(first: Path, second: Path) -> None:
    one, two = stored(first), stored(second)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    train(load_recipe(QUICK, SMALL), path, compile=False)
    return path


def test_everything_of_the_schedule_is_stored(whole: Path) -> None:
    run = open_run(whole)
    assert run.complete
    np.testing.assert_array_equal(run.steps, run.recipe.checkpoints.steps(120))
    assert run.params.sizes["seed"] == 3
    assert all(np.isfinite(value).all() for value in run.params.values())
    loss = run.metrics["loss"]
    assert loss.shape == (3, 120)
    assert np.isfinite(loss).all()
    assert float(loss[:, -20:].mean()) < float(loss[:, :20].mean())
    assert np.isnan(run.metrics["diverged_at"]).all()


def test_logged_loss_is_that_of_the_stored_parameters(whole: Path) -> None:
    """loss[t] is that of the parameters at step t, on the batch of the update after it."""
    from mechicl.training.workers import draw_from

    run = open_run(whole)
    for step in (0, 10, 50):
        batch = next(draw_from(run.recipe, run.seeds.tolist(), step))
        prompts = run.task.prompts(batch)
        weights = {
            str(name): torch.from_numpy(value.sel(step=step).values)
            for name, value in run.params.items()
        }
        predictions = run.recipe.model.predict(weights, prompts.inputs)
        expected = ((predictions - prompts.targets) ** 2).mean(-1)
        np.testing.assert_allclose(
            run.metrics["loss"].sel(log_step=step), expected, rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("stop_after", [1, 4, 11])
def test_resuming_gives_the_same_bits(whole: Path, tmp_path: Path, stop_after: int) -> None:
    recipe = load_recipe(QUICK, SMALL)
    path = tmp_path / "run"
    seen = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress.step)
        if len(seen) == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, path, compile=False, on_progress=interrupt)
    assert 0 < open_run(path).trajectory.attrs["n_saved"] < len(recipe.checkpoints.steps(120))
    assert not open_run(path).complete
    train(recipe, path, compile=False, resume=True)
    assert_same_bits(path, whole)


def test_number_of_cores_does_not_change_bits_on_resume(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grouping of seeds into workers is the run's, not the machine's."""
    recipe = load_recipe(QUICK, SMALL)

    def interrupt(progress: Progress) -> None:
        if progress.step >= 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", compile=False, on_progress=interrupt)
    groups = open_run(tmp_path / "run").config["groups"]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    train(recipe, tmp_path / "run", compile=False, resume=True)
    assert open_run(tmp_path / "run").config["groups"] == groups
    assert_same_bits(tmp_path / "run", whole)


_KILLED = """
import sys
from pathlib import Path
from mechicl.training import load_recipe
from mechicl.training.loop import train
import yaml
recipe = load_recipe({quick!r}, yaml.safe_load({settings!r}))
train(recipe, Path(sys.argv[1]), compile=False)
"""


def test_killed_in_mid_training_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL of a whole process, with part of the run committed, then resumed to the end."""
    settings = {**SMALL, "n_steps": 600, "seeds": [1, 2], "every": 1}
    recipe = load_recipe(QUICK, settings)
    planned = len(recipe.checkpoints.steps(600))
    path = tmp_path / "killed"
    script = _KILLED.format(quick=QUICK, settings=yaml.safe_dump(settings))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], env=environment)
    deadline = time.monotonic() + 120
    saved = 0
    while saved == 0:
        assert process.poll() is None, "training ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
        try:
            saved = open_run(path).trajectory.attrs["n_saved"]
        except mechicl.errors.MechiclError:
            continue
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = open_run(path)
    saved = run.trajectory.attrs["n_saved"]
    assert 0 < saved < planned
    assert all(np.isfinite(value).all() for value in run.params.values())
    train(recipe, path, compile=False, resume=True)
    train(recipe, tmp_path / "whole", compile=False)
    assert_same_bits(path, tmp_path / "whole")


def test_a_changed_recipe_is_not_resumed(whole: Path) -> None:
    changed = load_recipe(QUICK, {**SMALL, "d": 3, "learning_rate": 0.5})
    keys = r"optimizer\.learning_rate: 0\.01 -> 0\.5; task\.d: 2 -> 3"
    with pytest.raises(InputError, match=keys):
        train(changed, whole, resume=True)


def test_a_complete_run_is_left_alone(whole: Path) -> None:
    before, remarks = stored(whole), []
    train(load_recipe(QUICK, SMALL), whole, resume=True, compile=False, notify=remarks.append)
    assert "is complete" in remarks[0]
    for name, value in stored(whole).items():
        np.testing.assert_array_equal(value, before[name])


def test_other_libraries_are_told(whole: Path, tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "run"
    shutil.copytree(whole, path)
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["versions"]["torch"] = "2.0.0"
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    remarks = []
    train(load_recipe(QUICK, SMALL), path, resume=True, compile=False, notify=remarks.append)
    assert "torch 2.0.0 ->" in remarks[0]


def test_an_existing_directory_is_never_wiped(whole: Path, tmp_path: Path) -> None:
    before = stored(whole)
    with pytest.raises(InputError, match="--overwrite"):
        train(load_recipe(QUICK, SMALL), whole, compile=False)
    for name, value in stored(whole).items():
        np.testing.assert_array_equal(value, before[name])
    mine = tmp_path / "notes"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(InputError):
            train(load_recipe(QUICK, SMALL), mine, overwrite=overwrite, compile=False)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_divergence_is_marked_and_the_others_go_on(tmp_path: Path) -> None:
    recipe = load_recipe(QUICK, {**SMALL, "optimizer.name": "sgd", "learning_rate": 3.0})
    train(recipe, tmp_path / "run", compile=False)
    run = open_run(tmp_path / "run")
    assert run.complete
    at = run.metrics["diverged_at"]
    assert np.isfinite(at).any(), "nothing diverged: choose a larger rate"
    for seed in run.seeds:
        params, when = run.params.sel(seed=seed), float(at.sel(seed=seed))
        for value in params.values():
            finite = np.isfinite(value).all([dim for dim in value.dims if dim != "step"])
            expected = run.steps <= when if np.isfinite(when) else np.ones(len(run.steps), bool)
            np.testing.assert_array_equal(finite, expected)
        if np.isfinite(when):
            loss = run.metrics["loss"].sel(seed=seed)
            assert np.isfinite(loss[: int(when)]).all()
            # The loss at that step may be finite still, where it is the gradient that overflowed.
            assert not np.isfinite(loss[int(when) + 1 :]).any()
            with pytest.raises(mechicl.errors.MechiclError, match="diverged at step"):
                run.model(step=120, seed=int(seed))


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_devices_that_are_not_there(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA; lifted on machines without")
    with pytest.raises(InputError, match="cpu"):
        train(load_recipe(QUICK, SMALL), tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


def test_compiled_and_plain_steps_agree(whole: Path, tmp_path: Path) -> None:
    """Or, without a compiler, training says so once and goes on."""
    remarks = []
    recipe = load_recipe(QUICK, SMALL)
    train(recipe, tmp_path / "run", notify=remarks.append)
    assert len(remarks) <= 1
    first, second = stored(whole), stored(tmp_path / "run")
    for name in recipe.model.parameters(recipe.task):
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=1e-3)


def test_without_a_compiler_there_is_one_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler\nand a long trace")

    monkeypatch.setattr("torch.compile", lambda step, **_: no_compiler)
    remarks = []
    train(load_recipe(QUICK, SMALL), tmp_path / "run", notify=remarks.append)
    assert remarks == ["training without a compiler, which is slower (no C++ compiler)"]
    assert open_run(tmp_path / "run").complete


def test_torch_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    train(load_recipe(QUICK, SMALL), tmp_path / "run", compile=False)
    assert torch.get_num_threads() == before
