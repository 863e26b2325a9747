"""`mechicl export`: one file, and what is refused in a sentence with nothing written."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

import mechicl
from mechicl.cli import app
from mechicl.run import Run

SMALL = {"d": 2, "n_context": 5, "batch_size": 8, "seeds": [0, 3]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two updates."""
    path = tmp_path_factory.mktemp("export") / "run"
    small = SMALL | {"n_steps": 2}
    return mechicl.train("he2025-two-head-quick", path, overrides=small, compile=False)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_checkpoint_is_exported(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "one.safetensors"
    asked = ["export", run.path, "--step", 2, "--seed", 3, "--out", target]
    done = call(*asked)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"seed 3 at step 2 is in {target}\n"
    state = run.state_dict(step=2, seed=3)
    assert {key: value.tolist() for key, value in load_file(target).items()} == {
        key: value.tolist() for key, value in state.items()
    }


def test_a_file_is_replaced_only_where_that_is_asked_for(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "one.safetensors"
    target.write_text("mine")
    asked = ["export", run.path, "--step", 2, "--seed", 0, "--out", target]
    done = call(*asked)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{target} is there already" in done.stderr
    assert "--overwrite" in done.stderr
    assert target.read_text() == "mine"
    assert call(*asked, "--overwrite").exit_code == 0
    assert set(load_file(target)) == {"W_Q", "W_K", "W_V", "W_O"}


@pytest.mark.parametrize(
    ("step", "seed", "out", "code", "message"),
    [
        (1_013, 0, "one.safetensors", 2, "step 1013 is not stored; its neighbour is 2"),
        (2, 1, "one.safetensors", 2, "the run has no seed 1; it has [0, 3]"),
        (2, 0, "folder", 2, "folder is a directory; give a file"),
        (2, 0, "folder.safetensors", 2, "folder.safetensors is a directory; give a file"),
        (2, 0, "one.pt", 2, "ends in .safetensors"),
        (2, 0, ".safetensors", 2, "ends in .safetensors"),
        (2, 0, "link.safetensors", 2, "is there already"),
        (2, 0, "x" * 300 + ".safetensors", 2, "is no place to write to"),
        (2, 0, "file/one.safetensors", 1, "cannot write"),
        (2, 0, "trajectory.zarr/W_Q/one.safetensors", 2, "lies among the arrays of a run"),
    ],
)
def test_refusals_write_nothing(
    run: Run, tmp_path: Path, step: int, seed: int, out: str, code: int, message: str
) -> None:
    for folder in ("folder", "folder.safetensors"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    done = call("export", run.path, "--step", step, "--seed", seed, "--out", tmp_path / out)
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("out", "message"), [("", "empty"), ("memory://one.safetensors", "only local files")]
)
def test_places_that_are_no_files(run: Run, out: str, message: str) -> None:
    done = call("export", run.path, "--step", 2, "--seed", 0, "--out", out)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_diverged_seed_is_refused(tmp_path: Path) -> None:
    settings = SMALL | {"n_steps": 40, "optimizer.name": "sgd", "learning_rate": 1e3}
    run = mechicl.train(
        "he2025-two-head-quick", tmp_path / "run", overrides=settings, compile=False
    )
    target = tmp_path / "one.safetensors"
    done = call("export", run.path, "--step", 40, "--seed", 3, "--out", target)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"seed 3 diverged at step {run.diverged()[3]}; it has no model at step 40" in done.stderr
    assert not target.exists()
    assert call("export", run.path, "--step", 0, "--seed", 3, "--out", target).exit_code == 0


@pytest.mark.parametrize("missing", ["--step", "--seed", "--out"])
def test_step_seed_and_file_are_said(run: Run, tmp_path: Path, missing: str) -> None:
    options = {"--step": "2", "--seed": "0", "--out": str(tmp_path / "one.safetensors")}
    del options[missing]
    given = [word for option in options.items() for word in option]
    done = call("export", run.path, *given)
    assert done.exit_code == 2
    assert missing in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_export_needs_no_torch(run: Run, tmp_path: Path) -> None:
    code = (
        f"import mechicl, sys; run = mechicl.open_run({str(run.path)!r})\n"
        f"run.export({str(tmp_path / 'one.safetensors')!r}, step=2, seed=0)\n"
        "print([name for name in ('torch', 'transformer_lens') if name in sys.modules])\n"
        "run.state_dict(step=2, seed=0)\n"
        "print([name for name in ('torch', 'transformer_lens') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "['torch']"], done.stderr
