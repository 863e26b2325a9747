"""`mechicl study`: what it prints and writes, its exit codes, and that a mistake costs nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

import mechicl
from mechicl.cli import app
from tests import runs


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of a regression that differ in noise, one of which has a seed that fails."""
    root = tmp_path_factory.mktemp("cli-study")
    runs.write(root / "quiet")
    runs.write(root / "loud", seeds=[1, 2], mu=[[2, -2], [2, 2]], noise_variance=0.5)
    return root


@pytest.fixture
def here(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(many, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["study", *map(str, arguments)])


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.split()[1:]


def test_a_study_is_printed_and_written(here: Path) -> None:
    done = call("runs/*", "--probe", "sign_matching", "--probe", "circuits")
    assert done.exit_code == 0, done.stderr
    assert row(done.stdout, "sign_matching") == ["2", "3", "2", "1", "0", "0"]
    assert "sign_matching: on every live head" in done.stdout
    written = [line for line in done.stdout.splitlines() if line.startswith(str(here))]
    assert [str(Path(line).relative_to(here)) for line in written] == [
        "study.zarr",
        "study.csv",
        "study-figures/sign_matching.png",
        "study-figures/circuits.png",
    ]
    assert all(Path(line).exists() for line in written)
    made = mechicl.open_study("study.zarr")
    assert made.results["sign_matching"]["task.noise_variance"].values.tolist() == [0.5, 0.1]
    assert "task.d" not in pd.read_csv("study.csv")


def test_json_is_one_document(here: Path) -> None:
    done = call("runs", "--probe", "circuits", "--json", "--no-plot")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["runs"] == 2
    assert document["probes"]["circuits"]["seeds"] == 3
    assert [each["run"] for each in document["table"]] == ["loud", "loud", "quiet"]
    assert document["table"][1]["since"] is not None
    assert document["failures"] == []
    assert [Path(path).name for path in document["files"]] == ["study.zarr", "study.csv"]
    assert not (here / "study-figures").exists()


def test_a_verdict_that_never_holds_is_null_in_json(here: Path) -> None:
    done = call("runs/loud", "--probe", "sign_matching", "--json", "--no-plot")
    table = json.loads(done.stdout)["table"]
    assert [each["since"] for each in table] == [0.0, None]


def test_settings_of_probes(here: Path) -> None:
    call("runs", "--probe", "sign_matching", "--set", "dummy_threshold=0.5", "--no-plot")
    result = mechicl.open_study("study.zarr").results["sign_matching"]
    assert json.loads(result.attrs["parameters"]) == {"dummy_threshold": 0.5}


def test_one_damaged_run_is_told_and_the_rest_is_done(here: Path) -> None:
    (here / "runs" / "loud" / "config.yaml").unlink()
    done = call("runs/*", "--probe", "sign_matching", "--no-plot")
    assert done.exit_code == 4
    assert f"{here / 'runs' / 'loud'}: failed: " in done.stdout
    assert "config.yaml is missing" in done.stdout
    assert row(done.stdout, "sign_matching")[:2] == ["1", "1"]
    document = json.loads(call("runs", "--probe", "sign_matching", "--json").stdout)
    (failure,) = document["failures"]
    assert failure["kind"] == "failed"
    for name in ("quiet", "loud"):
        shutil.rmtree(here / "runs" / name / "trajectory.zarr")
    done = call("runs/quiet", "--probe", "sign_matching", "--out", "other.zarr")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "its training has not begun" in done.stderr


def test_a_reason_of_several_lines_is_told_in_one(here: Path) -> None:
    (here / "runs" / "loud" / "config.yaml").write_text("::: [")
    done = call("runs/*", "--probe", "sign_matching", "--no-plot")
    (line,) = [line for line in done.stdout.splitlines() if "is not YAML: while parsing" in line]
    assert line.endswith("column 1")


def test_mixed_tasks(here: Path) -> None:
    tiny = {"n_steps": 2, "seeds": [0], "batch_size": 4}
    mechicl.train("yuksel2026-minimal", here / "runs" / "chain", overrides=tiny, compile=False)
    done = call("runs", "--probe", "sign_matching", "--no-plot", "--all-columns")
    assert done.exit_code == 4
    assert "chain: sign_matching does not apply: the run has no " in done.stdout
    made = mechicl.open_study("study.zarr")
    names = made.runs["run_name"].values.tolist()
    assert names == ["chain", "loud", "quiet"]
    assert made.runs["task.blocks"].values.tolist()[1:] == ["", ""]
    assert np.isnan(made.runs["task.noise_variance"].values[0])
    assert made.results["sign_matching"]["run"].values.tolist() == [1, 2]
    table = pd.read_csv("study.csv")
    assert set(table["run"]) == {"loud", "quiet"}
    assert "task.n_context" in table


def test_a_comparative_probe_is_given_other_runs(here: Path) -> None:
    tiny = {"n_steps": 2, "seeds": [0], "batch_size": 4}
    for name, context in (("a", 2), ("b", 3)):
        given = tiny | {"context": context}
        mechicl.train("yuksel2026-minimal", here / name, overrides=given, compile=False)
    few = ["--set", "n_prompts=8", "--no-plot"]
    done = call("a", "--probe", "context_kl", *few, "--against", "two=b")
    assert done.exit_code == 0, done.stderr
    result = mechicl.open_study("study.zarr").results["context_kl"]
    assert "two" in result["reference"].attrs["flag_meanings"]
    assert list(json.loads(result.attrs["against"])) == ["two"]
    done = call("a", "runs/quiet", "--probe", "context_kl", *few, "--against", "b")
    assert done.exit_code == 4
    assert "quiet: context_kl does not apply" in done.stdout


def test_the_same_run_twice_is_told(here: Path) -> None:
    done = call("runs", "runs/quiet", "--probe", "sign_matching", "--no-plot")
    assert done.exit_code == 0
    assert "kept once: runs/quiet" in done.stderr
    assert row(done.stdout, "sign_matching")[0] == "2"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["runs"], 2, "--probe names what to run; there are activation_patching"),
        (["runs", "--probe", "circuts"], 2, "did you mean 'circuits'"),
        (["runs", "--probe", "circuits", "--set", "x=1"], 2, "there is no setting 'x'"),
        (["runs", "--probe", "circuits", "--set", "x"], 2, "--set takes KEY=VALUE"),
        (["absent", "--probe", "circuits"], 2, "there is no absent"),
        (["absent/*", "--probe", "circuits"], 3, "no run matches"),
        (["runs", "--probe", "circuits", "--join", "left"], 2, "Known: inner, last, outer"),
        (["runs", "--probe", "circuits", "--jobs", "0"], 2, "jobs is an integer from 1"),
        (["runs", "--probe", "circuits", "--out", "x"], 2, "ends in .zarr"),
        (["runs", "--probe", "circuits", "--limit", "1e-8"], 2, "over the limit"),
        (["runs", "--probe", "circuits", "--limit", "1e-8"], 2, "limit of 9.3e-09 GiB"),
        (["runs", "--probe", "circuits", "--limit", "nan"], 2, "a byte at least; given nan"),
        (["runs", "--probe", "circuits", "--limit", "1e300"], 2, "a byte at least; given 1e+300"),
        (["runs", "--probe", "circuits", "--limit", "1e-12"], 2, "a byte at least; given 1e-12"),
        (["runs", "--probe", "circuits", "--scheduler", "x", "--jobs", "2"], 2, "give one"),
        (["runs", "--probe", "circuits", "--against", "runs/quiet"], 2, "against others"),
        (["runs", "--probe", "head_permutation"], 3, "no probe applies to any"),
    ],
)
def test_mistakes(here: Path, arguments: list[str], code: int, said: str) -> None:
    done = call(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr
    assert not (here / "study.zarr").exists()


def test_a_study_of_trajectory_probes_needs_no_torch(here: Path) -> None:
    code = (
        "import sys; sys.argv = ['mechicl', 'study', 'runs', '--probe', 'sign_matching']\n"
        "from mechicl.cli import main\n"
        "try: main()\nexcept SystemExit as e: assert e.code == 0\n"
        "print([m for m in ('torch', 'transformer_lens', 'distributed') if m in sys.modules])"
    )
    root = str(Path(mechicl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert (here / "study.csv").exists()
