"""Training end to end: what is stored, resuming to the same bits, refusals, divergence."""

import os
import shutil
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
from mechicl.errors import DamagedRunError, InputError
from mechicl.run import open_run
from mechicl.training import load_recipe
from mechicl.training.batches import draw_from
from mechicl.training.loop import Progress, train
from mechicl.training.step import make_step
from mechicl.training.workers import Worker

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
    """Train a whole run that tests read and change nothing of."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(load_recipe(QUICK, SMALL), path, compile=False)
    return path


@pytest.fixture
def whole_copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole run that a test may harm."""
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def interrupted(path: Path, **options: object) -> None:
    """Train into `path` until a checkpoint past step 50, then stop as Ctrl-C does."""

    def interrupt(progress: Progress) -> None:
        if progress.step >= 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(load_recipe(QUICK, SMALL), path, on_progress=interrupt, **options)


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
    run = open_run(whole)
    checked = 0
    for step in (0, 10, 50):
        batch = next(draw_from(run.recipe, run.seeds.tolist(), step)).examples
        prompts = run.task.prompts(batch)
        weights = {
            str(name): torch.from_numpy(value.sel(step=step).values)
            for name, value in run.params.items()
        }
        predictions = run.recipe.model.predict(run.task, weights, prompts.inputs)
        expected = ((predictions - prompts.targets) ** 2).mean(-1)
        np.testing.assert_allclose(
            run.metrics["loss"].sel(log_step=step), expected, rtol=1e-4, atol=0
        )
        checked += 1
    assert checked == 3


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


@pytest.mark.parametrize("n_cores", [1, 3])
def test_workers_of_a_resumed_run_are_those_it_was_begun_with(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_cores: int
) -> None:
    """The grouping of seeds is the run's, not the machine's: compiled bits depend on it."""
    groups: list[list[int]] = []

    class Recorded(Worker):
        def __init__(self, *arguments: object, **options: object) -> None:
            groups.append(list(arguments[3]))
            super().__init__(*arguments, **options)

    monkeypatch.setattr("mechicl.training.loop.Worker", Recorded)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    interrupted(tmp_path / "run", compile=False)
    assert groups == [[3, 5], [8]]
    groups.clear()
    monkeypatch.setattr("os.cpu_count", lambda: n_cores)
    train(load_recipe(QUICK, SMALL), tmp_path / "run", compile=False, resume=True)
    assert groups == [[3, 5], [8]]
    assert_same_bits(tmp_path / "run", whole)


_KILLED = """
import sys
from pathlib import Path
from mechicl.training import load_recipe
from mechicl.training.loop import train
import yaml
from mechicl.checkpoints import layout
layout.MAX_CHUNK_STEPS = 16  # a chunk that is full is committed: the first one early
recipe = load_recipe({quick!r}, yaml.safe_load({settings!r}))
train(recipe, Path(sys.argv[1]), compile=False)
"""


def test_killed_in_mid_training_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL of a whole process, with part of the run committed, then resumed to the end."""
    settings = {**SMALL, "n_steps": 400, "seeds": [1, 2], "every": 5}
    recipe = load_recipe(QUICK, settings)
    path = tmp_path / "killed"
    script = _KILLED.format(quick=QUICK, settings=yaml.safe_dump(settings))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], env=environment)
    try:
        deadline, saved = time.monotonic() + 120, 0
        while saved == 0:
            assert process.poll() is None, "training ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
            try:
                saved = open_run(path).trajectory.attrs["n_saved"]
            except mechicl.errors.MechiclError:
                continue
    finally:
        process.kill()
        process.wait()
    run = open_run(path)
    assert 0 < run.trajectory.attrs["n_saved"] < len(recipe.checkpoints.steps(recipe.n_steps))
    assert all(np.isfinite(value).all() for value in run.params.values())
    train(recipe, path, compile=False, resume=True)
    train(recipe, tmp_path / "whole", compile=False)
    assert_same_bits(path, tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"d": 3, "learning_rate": 0.5},
            r"optimizer\.learning_rate: 0\.01 -> 0\.5; task\.d: 2 -> 3",
        ),
        ({"seeds": [3, 5]}, r"seeds: \[3, 5, 8\] -> \[3, 5\]"),
    ],
)
def test_a_changed_recipe_is_not_resumed(whole_copy: Path, change: dict, message: str) -> None:
    before = stored(whole_copy)
    with pytest.raises(InputError, match=message):
        train(load_recipe(QUICK, SMALL | change), whole_copy, resume=True, compile=False)
    for name, value in stored(whole_copy).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    "change",
    [
        {"groups": 3},
        {"groups": [[1, 0], [2]]},
        {"groups": [[0], [1]]},
        {"groups": [[0], ["1"], [2]]},
        {"versions": None},
        {"versions": "1.0"},
    ],
)
def test_a_config_that_was_altered_outside_its_recipe_is_not_resumed(
    whole_copy: Path, change: dict
) -> None:
    """Groups in another order would give the numbers of one seed to another."""
    config = yaml.safe_load((whole_copy / "config.yaml").read_text())
    (whole_copy / "config.yaml").write_text(yaml.safe_dump(config | change))
    with pytest.raises(DamagedRunError, match=r"config\.yaml is not what was written: its groups"):
        train(load_recipe(QUICK, SMALL), whole_copy, resume=True, compile=False)


def test_a_complete_run_is_left_alone(whole_copy: Path) -> None:
    before, remarks = stored(whole_copy), []
    train(load_recipe(QUICK, SMALL), whole_copy, resume=True, compile=False, notify=remarks.append)
    (remark,) = remarks
    assert "is complete" in remark
    for name, value in stored(whole_copy).items():
        np.testing.assert_array_equal(value, before[name])


def resuming(path: Path, **options: object) -> list[str]:
    """Resume the run at `path` and return what was remarked."""
    remarks: list[str] = []
    train(load_recipe(QUICK, SMALL), path, resume=True, notify=remarks.append, **options)
    return remarks


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("versions", "torch"), "2.0.0", "torch 2.0.0 -> "),
        (("versions", "mechicl"), "0.0.1", "mechicl 0.0.1 -> "),
        (("device",), "tpu", "device tpu -> cpu"),
    ],
)
def test_another_device_and_other_libraries_are_told(
    whole_copy: Path, keys: tuple[str, ...], value: str, message: str
) -> None:
    config = yaml.safe_load((whole_copy / "config.yaml").read_text())
    *sections, key = keys
    target = config
    for section in sections:
        target = target[section]
    target[key] = value
    (whole_copy / "config.yaml").write_text(yaml.safe_dump(config))
    assert message in resuming(whole_copy, device="cpu", compile=False)[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_another_kind_of_step_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setattr("torch.compile", lambda step, **_: step)
    interrupted(tmp_path / "run", compile=False)
    told = ["the run began with another kind of step (compiled or not): bits will differ"]
    assert resuming(tmp_path / "run", compile=compiled) == (told if compiled else [])


def test_an_existing_directory_is_never_wiped(whole_copy: Path, tmp_path: Path) -> None:
    before = stored(whole_copy)
    with pytest.raises(InputError, match="--overwrite"):
        train(load_recipe(QUICK, SMALL), whole_copy, compile=False)
    for name, value in stored(whole_copy).items():
        np.testing.assert_array_equal(value, before[name])
    mine = tmp_path / "notes"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(InputError):
            train(load_recipe(QUICK, SMALL), mine, overwrite=overwrite, compile=False)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_overwriting_replaces_the_run(whole_copy: Path) -> None:
    other = load_recipe(QUICK, SMALL | {"n_steps": 30, "seeds": [9]})
    train(other, whole_copy, overwrite=True, compile=False)
    run = open_run(whole_copy)
    assert (run.recipe, run.seeds.tolist(), run.steps[-1]) == (other, [9], 30)


def test_progress_tells_the_mean_loss_since_the_last_checkpoint(tmp_path: Path) -> None:
    seen: list[Progress] = []
    train(load_recipe(QUICK, SMALL), tmp_path / "run", compile=False, on_progress=seen.append)
    run = open_run(tmp_path / "run")
    assert [progress.step for progress in seen] == run.steps.tolist()
    assert np.isnan(seen[0].loss).all()
    for before, progress in zip(run.steps[:-1], seen[1:], strict=True):
        loss = run.metrics["loss"].values[:, before : progress.step]
        np.testing.assert_allclose(progress.loss, loss.mean(1), rtol=1e-6)
    assert len(seen) == len(run.steps) > 10


def test_divergence_is_marked_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At this rate some of eight seeds diverge; the others are trained as if they were alone."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # all of them in one stack
    settings = SMALL | {"optimizer.name": "sgd", "learning_rate": 0.55, "seeds": list(range(8))}
    train(load_recipe(QUICK, settings), tmp_path / "run", compile=False)
    run = open_run(tmp_path / "run")
    assert run.complete
    at = run.metrics["diverged_at"]
    gone, left = run.seeds[np.isfinite(at)].tolist(), run.seeds[np.isnan(at)].tolist()
    assert min(len(gone), len(left)) > 0, "choose another rate"
    for seed in gone:
        params, loss, when = (
            run.params.sel(seed=seed),
            run.metrics["loss"].sel(seed=seed),
            at.sel(seed=seed),
        )
        for value in params.values():
            finite = np.isfinite(value).all([dim for dim in value.dims if dim != "step"])
            np.testing.assert_array_equal(finite, run.steps <= when.item())
        assert np.isfinite(loss[: int(when)]).all()
        # The loss at that step may be finite still, where it is the gradient that overflowed.
        assert np.isnan(loss[int(when) + 1 :]).all()
        with pytest.raises(mechicl.errors.MechiclError, match=f"seed {seed} diverged at step"):
            run.model(step=120, seed=seed)
    train(load_recipe(QUICK, settings | {"seeds": left}), tmp_path / "left", compile=False)
    alone = open_run(tmp_path / "left").trajectory
    for name in (*run.params, "loss"):
        np.testing.assert_array_equal(run.trajectory[name].sel(seed=left), alone[name])
    assert run.model(step=120, seed=left[0]) is not None


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_devices_that_are_not_there(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA; lifted on machines without")
    with pytest.raises(InputError, match="cpu"):
        train(load_recipe(QUICK, SMALL), tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_compiled_and_plain_steps_agree(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one group of seeds, so one compilation
    remarks: list[str] = []
    recipe = load_recipe(QUICK, SMALL)
    train(recipe, tmp_path / "run", notify=remarks.append)
    if remarks:
        pytest.skip(f"{remarks[0]}; lifted where there is a compiler")
    first, second = stored(whole), stored(tmp_path / "run")
    names = (*recipe.model.parameters(recipe.task), "loss")
    assert len(names) == 5
    for name in names:
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=1e-5)


def test_without_a_compiler_there_is_one_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler\nand a long trace")

    monkeypatch.setattr("torch.compile", lambda step, **_: no_compiler)
    remarks: list[str] = []
    train(load_recipe(QUICK, SMALL), tmp_path / "run", notify=remarks.append)
    assert remarks == ["training without a compiler, which is slower (no C++ compiler)"]
    assert open_run(tmp_path / "run").complete


def test_torch_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    train(
        load_recipe(QUICK, SMALL | {"n_steps": 10}),
        tmp_path / "run",
        compile=False,
        on_progress=lambda _: seen.append(torch.get_num_threads()),
    )
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "change",
    [{"d": 1_000_000}, {"n_steps": 2**24, "every": 2, "d": 40}],
    ids=["width", "steps"],
)
def test_what_the_machine_has_no_room_for_is_refused(tmp_path: Path, change: dict) -> None:
    with pytest.raises(InputError):
        train(load_recipe(QUICK, SMALL | change), tmp_path / "run", compile=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_many_recipes_in_one_process_are_all_compiled(tmp_path: Path) -> None:
    """Torch gives up on a function that it has compiled eight times over."""
    remarks = []
    for n_context in range(2, 12):
        recipe = load_recipe(QUICK, {**SMALL, "n_context": n_context, "n_steps": 3, "seeds": [0]})
        train(recipe, tmp_path / str(n_context), notify=remarks.append)
    if len(remarks) == 10:
        pytest.skip(f"{remarks[0]}; lifted where there is a compiler")
    assert remarks == []


_TWO_AT_ONCE = """
import sys, threading
import torch
from mechicl.training import load_recipe
from mechicl.training.compilation import compiled_step
from mechicl.training.step import initial_state
from mechicl.training.batches import draw_block

recipe = load_recipe("he2025-two-head-quick", {"d": 2, "n_context": 64, "batch_size": 512})
step, compiled = compiled_step(recipe, [1], "cpu", print)
if not compiled:
    sys.exit(77)
sys.setswitchinterval(1e-5)
torch.set_num_threads(1)
failures = []

def work(seed):
    state, normals = initial_state(recipe, (seed,)), draw_block(recipe, (seed,), 0)[:, 0]
    try:
        with torch.no_grad():
            for _ in range(10_000):
                state, _ = step(state, normals)
    except RuntimeError as error:
        failures.append(error)

threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*failures)
sys.exit(len(failures))
"""


@pytest.mark.slow
def test_two_workers_step_at_once() -> None:
    """Threads that share a compiled step do not disturb each other, however they interleave."""
    done = subprocess.run(
        [sys.executable, "-c", _TWO_AT_ONCE], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("no compiler here; lifted where there is one")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_step_that_does_not_compile_whole_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mechicl.training import compilation

    def breaking(recipe: object) -> object:
        whole = make_step(recipe)

        def step(state: object, examples: object, kept: object = None) -> object:
            torch._dynamo.graph_break()
            return whole(state, examples, kept)

        return step

    monkeypatch.setattr(compilation, "make_step", breaking)
    remarks: list[str] = []
    recipe = load_recipe(QUICK, {**SMALL, "batch_size": 3})
    _, compiled = compilation.compiled_step(recipe, [1], "cpu", remarks.append)
    assert not compiled
    assert len(remarks) == 1
    if "compile whole" not in remarks[0]:
        pytest.skip(f"{remarks[0]}; lifted where there is a compiler")
