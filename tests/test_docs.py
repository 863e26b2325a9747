"""What the pages show works: the examples, the README's notebook, the probe of the five steps."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import mechicl
from mechicl import analyses, plots, schema
from mechicl.cli import app
from mechicl.run import Run
from mechicl.training import recipe_names

ROOT = Path(__file__).parents[1]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def command(page: str, start: str) -> list[str]:
    """The arguments of the one shell command of a page that begins so."""
    lines = [line.strip() for line in (ROOT / page).read_text().splitlines()]
    (found,) = [line for line in lines if line.startswith(start)]
    return shlex.split(found, comments=True)[1:]


SAYS = {
    "hook_into_a_checkpoint": "seed 3: not a head of each sign",
    "import_checkpoints": "it would match with heads interleaved (W_O: 'd_model (head d_head)')",
    "patch_activations": "1.00 with all heads of them",
    "study_many_runs": "2 heads: a head of each sign on ",
}
"""What each example finds, on the run that tests share or on runs that it makes."""

SWEEP = """
recipe: he2025-two-head-quick
set: {d: 2, n_context: 5, batch_size: 8, n_steps: 4, seeds: [0, 1]}
grid: {n_heads: [1, 2], noise_variance: [0.1, 0.5]}
"""


def test_there_are_examples() -> None:
    found = {path.stem for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh")}
    assert found == {*SAYS, "from_the_shell"}


@pytest.mark.parametrize("name", SAYS)
def test_examples_run(
    name: str,
    trained: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "tiny.yaml").write_text(SWEEP)
    if name == "study_many_runs":  # which trains what is not there, and compiles
        list(mechicl.sweep(tmp_path / "tiny.yaml", tmp_path / "tiny", compile=False))
    given = {
        "import_checkpoints": [tmp_path / "new"],
        "study_many_runs": [tmp_path / "tiny.yaml", tmp_path / "tiny"],
    }.get(name, [trained.path])
    script = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(each) for each in (script, *given)])
    n_threads = torch.get_num_threads()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(n_threads)
    assert SAYS[name] in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_the_shell_runs(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "examples" / "from_the_shell.sh", tmp_path / "shell"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shell" / "two-heads" / "report.html").stat().st_size > 1e5
    assert (tmp_path / "shell" / "heads.zarr" / "zarr.json").exists()
    assert "4 runs: 4 complete" in done.stdout


def test_the_readmes_notebook_runs(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained.path, tmp_path / "runs" / "demo")
    shutil.copytree(trained.path, tmp_path / "runs" / "other")
    monkeypatch.chdir(tmp_path)
    blocks = code_blocks("README.md")
    assert len(blocks) == 2
    done = CliRunner().invoke(app, command("README.md", "mechicl study 'runs/*'"))
    assert done.exit_code == 0, done.stderr
    for block in blocks:
        code = block.replace("5000", "2000")  # the last step of the run that tests share
        exec(compile(code, "README.md", "exec"), {})


def test_the_page_of_studies_works(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("demo", "other"):
        shutil.copytree(trained.path, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    in_python, on_slurm = code_blocks("docs/studies.md")
    made: dict[str, object] = {}
    exec(compile(in_python, "docs/studies.md", "exec"), made)
    assert made["study"].runs.sizes["run"] == 2
    compile(on_slurm, "docs/studies.md", "exec")


def test_the_probe_of_the_five_steps_works(trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = code_blocks("docs/add-a-probe.md")
    module = types.ModuleType("weight_drift")
    monkeypatch.setitem(sys.modules, "weight_drift", module)
    exec(compile(block, "docs/add-a-probe.md", "exec"), module.__dict__)
    try:
        result = trained.analyze("weight_drift")
        assert (result["drift"].isel(step=0) == 0).all()
        assert (result["holds"].isel(step=-1) == 1).all()
        assert np.isfinite(result["since"]).all()
        assert json.loads(result.attrs["n_undefined"]) == {"nonfinite_parameters": 0}
        plots.draw(result)
    finally:
        registry = import_module("mechicl.analyses.probe")._REGISTRY
        del registry._entries["weight_drift"], registry._owners["weight_drift"]


def test_the_claim_and_the_check_of_the_page_work(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mechicl.studies import checks, load_claim

    page = (ROOT / "docs" / "add-a-claim.md").read_text()
    (claim,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "paper.page.yaml"
    path.write_text(claim)
    read = load_claim(path)
    checks.get(read.check).resolve(read.parameters)
    (block,) = code_blocks("docs/add-a-claim.md")
    module = types.ModuleType("final_loss")
    monkeypatch.setitem(sys.modules, "final_loss", module)
    try:
        exec(compile(block, "docs/add-a-claim.md", "exec"), module.__dict__)
        outcome = checks.get("final_loss")({"x": trained}, last=10)
        assert [each.seed for each in outcome.measurements] == trained.seeds.tolist()
        last = trained.metrics["loss"].isel(log_step=slice(-10, None), seed=0).mean()
        assert outcome.measurements[0].value == pytest.approx(float(last))
    finally:
        registry = import_module("mechicl.studies.checks.base")._REGISTRY
        registry._entries.pop("final_loss", None), registry._owners.pop("final_loss", None)


def test_the_dataset_page_has_every_dim_and_unit() -> None:
    page = (ROOT / "docs" / "dataset.md").read_text()
    missing = [name for name in (*schema.DIMS, *schema.UNITS) if f"`{name}`" not in page]
    assert missing == []


def test_the_dataset_page_has_every_variable_of_a_run(trained: Run) -> None:
    page = (ROOT / "docs" / "dataset.md").read_text()
    missing = [str(name) for name in trained.trajectory.variables if f"`{name}`" not in page]
    assert missing == []
    assert [key for key in trained.trajectory.attrs if f"`{key}`" not in page] == []


def test_the_changelog_and_the_readme_keep_up() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    known = (*analyses.names(), *recipe_names())
    assert [name for name in known if f"`{name}`" not in changelog] == []
    assert mechicl.__version__ in changelog


def test_the_architecture_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.stem for path in (ROOT / "mechicl").iterdir() if path.stem[0] != "_"} - {"py"}
    beside = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert {"importers", "stored"} < rooms and {"tests", "examples"} < beside
    assert [name for name in rooms | beside - {"mechicl"} if f"`{name}`" not in page] == []


def test_links_lead_somewhere() -> None:
    pages, counted = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], 0
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
            counted += 1
    assert counted >= 4
