"""`mechicl import` and `mechicl mappings`: a run from the shell, and mistakes in a sentence."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

import mechicl
from mechicl.cli import app
from mechicl.importers.mapping import mapping_names
from mechicl.training import Recipe
from tests.importers import theirs

STEPS = (500, 1000)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, a recipe and outputs of one of them."""
    path = tmp_path_factory.mktemp("theirs")
    modules = theirs.save_steps(theirs.StackedAttention, path / "checkpoints", STEPS)
    (path / "mine.yaml").write_text(yaml.safe_dump(theirs.REGRESSION))
    recipe = Recipe.model_validate(theirs.REGRESSION)
    inputs = recipe.task.sample(16, seed=0)["inputs"].values
    outputs = theirs.outputs_of(modules[500], inputs)
    np.savez(path / "outputs.npz", inputs=inputs, outputs=outputs, step=500)
    return path


def asked(folder: Path, out: Path, *more: object) -> list[object]:
    chosen = ["--recipe", folder / "mine.yaml", "--mapping", "linear", "--out", out]
    return ["import", folder / "checkpoints", *chosen, *more]


@pytest.fixture(scope="module")
def imported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those, imported from the shell."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    done = call(*asked(folder, out, "--outputs", folder / "outputs.npz"))
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"2 checkpoints of 1 seeds, 500 to 1,000, in {out}"
    assert lines[1].startswith("checked: seed 0 at step 500, 16 prompts, largest difference ")
    assert lines[2] == f"next: mechicl analyze {out}"
    assert done.stderr == ""
    return out


def test_info_says_what_it_is(imported: Path, folder: Path) -> None:
    said = " ".join(call("info", imported).stdout.split())
    assert "trained by others, not known how; imported by mechicl" in said
    assert f"imported from 2 files, {folder}/checkpoints/step-000500.pt to" in said
    assert f"checked outputs of 1 checkpoints, by {folder}/outputs.npz; largest difference" in said
    assert "loss by seed 0: not known" in said
    assert "mapping linear" in said
    assert "steps 500 to 1000" in said
    for word in ("optimizer", "batch size", "trained on"):
        assert word not in said


def test_the_other_commands_take_it(imported: Path, tmp_path: Path) -> None:
    done = call("verify", imported)
    assert (done.exit_code, done.stdout) == (0, f"{imported} is whole.\n")
    done = call("analyze", imported, "--probe", "sign_matching", "--out", tmp_path, "--no-plot")
    assert done.exit_code == 0
    assert "verdicts at step 1,000" in done.stdout
    again = tmp_path / "again.safetensors"
    assert call("export", imported, "--step", 500, "--seed", 0, "--out", again).exit_code == 0
    assert call("hooks", imported).exit_code == 0
    done = call("train", "he2025-two-head-quick", "--resume", "--out", imported)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "was imported: mechicl did not train it" in done.stderr


def test_unchecked_is_said_wherever_one_looks(folder: Path, tmp_path: Path) -> None:
    done = call(*asked(folder, tmp_path / "run", "--unchecked"))
    assert done.exit_code == 0
    assert "not checked: no outputs of theirs were compared" in done.stdout
    said = " ".join(call("info", tmp_path / "run").stdout.split())
    assert "checked no: nothing was compared, and the mapping may be wrong" in said


def test_a_seed_that_diverged_is_a_fault(folder: Path, tmp_path: Path) -> None:
    for step in STEPS:
        state = torch.load(folder / f"checkpoints/step-{step:06d}.pt", weights_only=True)
        state["q_proj.weight"] *= 1 if step == 500 else torch.nan
        torch.save(state, tmp_path / f"{step}.pt")
    options = ["--recipe", folder / "mine.yaml", "--mapping", "linear", "--unchecked"]
    done = call("import", "--seed", f"4={tmp_path}", *options, "--out", tmp_path / "run")
    assert done.exit_code == 1
    assert "seed 4 has NaN or infinities after step 500" in done.stderr
    assert mechicl.open_run(tmp_path / "run").diverged() == {4: 500}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "an import is checked by a forward pass"),
        (("--unchecked", "--seed", "0=x"), "give one folder of checkpoints, or --seed N=DIR"),
        (("--unchecked", "--set", "n_heads=3"), "q_proj.weight has shape (12, 6), and the layout"),
        (("--unchecked", "--set", "n_hedas=3"), "there is no setting 'n_hedas'"),
        (("--unchecked", "--mapping", "liner"), "there is no mapping 'liner'; did you mean 'line"),
        (("--unchecked", "--key", "model"), "has no state dict at 'model'"),
        (("--unchecked", "--losses", "gone.csv"), "the losses gone.csv cannot be read"),
        (("--outputs", "gone.npz"), "gone.npz cannot be read as .npz"),
        (
            ("--outputs", "OUTPUTS", "--set", "score_scale=1"),
            "it would match with score_scale 0.408",
        ),
        (("--unchecked", "--out", ""), "--out must be given"),
    ],
)
def test_mistakes_are_said_and_nothing_is_written(
    folder: Path, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    given = [str(folder / "outputs.npz") if word == "OUTPUTS" else word for word in more]
    done = call(*asked(folder, tmp_path / "run", *given))
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ((), "give one folder of checkpoints, or --seed N=DIR for each"),
        (("x",), "--seed takes N=DIR, as in --seed 0=runs/first; given 'x'"),
        (("-1=x",), "--seed takes N=DIR"),
        (("0=",), "--seed takes N=DIR"),
        (("0=a", "0=b"), "--seed gives 0 twice"),
        (("0=gone",), "gone is not there; give a folder"),
    ],
)
def test_seeds_are_folders(
    folder: Path, tmp_path: Path, seeds: tuple[str, ...], message: str
) -> None:
    options = [word for each in seeds for word in ("--seed", each)]
    chosen = ["--recipe", folder / "mine.yaml", "--mapping", "linear", "--unchecked"]
    done = call("import", *chosen, "--out", tmp_path / "run", *options)
    assert done.exit_code == 2
    assert message in done.stderr


def test_mappings_are_listed_and_shown() -> None:
    listed = call("mappings").stdout
    assert all(name in listed for name in mapping_names())
    shown = yaml.safe_load(call("mappings", "gpt2").stdout)
    assert shown["parameters"]["W_Q"]["part"] == {"qkv": "0 of 3"}
    done = call("mappings", "gtp2")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "did you mean 'gpt2'?" in done.stderr
    assert "has no file" in call("mappings", "mechicl").stderr


def test_what_needs_no_forward_pass_works_on_it_without_torch(imported: Path) -> None:
    code = (
        "import sys\nfrom mechicl.cli import main\n"
        "for words in (['info', RUN], ['verify', RUN], ['mappings'], ['analyze', RUN, '--probe', "
        "'circuits', '--no-plot']):\n"
        "    sys.argv = ['mechicl', *words]\n"
        "    try: main()\n    except SystemExit as e: assert not e.code, words\n"
        "assert 'torch' not in sys.modules"
    ).replace("RUN", repr(str(imported)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
