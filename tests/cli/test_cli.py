"""The shell: what it prints, what it writes, its exit codes, and that a mistake costs nothing."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner, Result

import mechicl
from mechicl import analyses
from mechicl.cli import app
from mechicl.run import Run

QUICK = "he2025-two-head-quick"
TINY = ["--set", "d=2", "--set", "n_context=5", "--set", "batch_size=16", "--no-compile"]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def snapshot(path: Path) -> dict[str, tuple[int, int]]:
    """Name, size and time of every file below `path`."""
    found = (p for p in path.rglob("*") if p.is_file())
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in found}


def test_analyze_one_probe(run_copy: Path) -> None:
    done = call("analyze", run_copy, "--probe", "sign_matching")
    assert done.exit_code == 0, done.stderr
    assert "sign_matching" in done.stdout
    assert "since" in done.stdout
    assert len(list(run_copy.glob("analyses/sign_matching-*.zarr"))) == 1
    assert len(list(run_copy.glob("figures/sign_matching-*.png"))) == 1


def test_analyze_every_probe(run_copy: Path) -> None:
    done = call("analyze", run_copy, "--no-plot", "--set", "approximate_loss.n_prompts=200")
    assert done.exit_code == 0, done.stderr
    for name in analyses.names():
        assert name in done.stdout
        assert list(run_copy.glob(f"analyses/{name}-*.zarr"))
    assert not (run_copy / "figures").exists()


def test_json_is_one_document_and_nothing_else(run_copy: Path) -> None:
    done = call(
        "analyze",
        run_copy,
        "--probe",
        "solution-manifold",
        "--probe",
        "circuits",
        "--json",
        "--no-plot",
    )
    assert done.exit_code == 0, done.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(done.stdout, parse_constant=refuse)
    assert set(document["probes"]) == {"solution_manifold", "circuits"}
    manifold = document["probes"]["solution_manifold"]
    assert manifold["variables"]["since"]["values"][1] is None, "seed 3 never reaches the manifold"
    assert manifold["variables"]["eta"]["dims"] == ["seed", "step"]
    assert manifold["coords"]["step"] == [2000]
    expected = mechicl.open_run(run_copy).analyze("solution_manifold")["eta"].values[:, -1]
    np.testing.assert_allclose(np.ravel(manifold["variables"]["eta"]["values"]), expected)
    assert all(Path(path).exists() for path in manifold["files"])


def test_steps_and_seeds_are_selected(run_copy: Path) -> None:
    done = call(
        "analyze", run_copy, "--probe", "head_roles", "--seed", 3, "--step", 0, "--step", 2000,
        "--json", "--no-plot",
    )  # fmt: skip
    coords = json.loads(done.stdout)["probes"]["head_roles"]["coords"]
    assert coords["seed"] == [3]
    assert coords["step"] == [0, 2000]


def test_settings_reach_the_probe(run_copy: Path) -> None:
    done = call(
        "analyze",
        run_copy,
        "--probe",
        "zero_sum_ov",
        "--set",
        "tolerance=1e-9",
        "--json",
        "--no-plot",
    )
    probe = json.loads(done.stdout)["probes"]["zero_sum_ov"]
    assert probe["parameters"]["tolerance"] == 1e-9
    assert probe["variables"]["holds"]["values"] == [[0.0], [0.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--probe", "sign_machting"], "did you mean 'sign_matching'"),
        (["--probe", "sign_matching", "--set", "tolerence=1"], "there is no setting 'tolerence'"),
        (["--probe", "zero_sum_ov", "--set", "tolerence=1"], "did you mean 'tolerance'"),
        (["--probe", "zero_sum_ov", "--set", "tolerance=much"], "tolerance: .*valid number"),
        (["--probe", "zero_sum_ov", "--set", "tolerance=-1"], "greater than 0"),
        (["--probe", "zero_sum_ov", "--set", "tolerance=.nan"], "finite"),
        (["--probe", "zero_sum_ov", "--set", "tolerance"], "KEY=VALUE"),
        (["--probe", "zero_sum_ov", "--set", "tolerance=1", "--set", "tolerance=2"], "twice"),
        (["--set", "tolerance=1"], "say whose setting it is"),
        (["--probe", "circuits", "--set", "zero_sum_ov.tolerance=1"], "among those that run"),
        (["--probe", "circuits", "--step", "3333"], "neighbours are"),
        (["--probe", "circuits", "--seed", "1"], r"it has \[0, 3\]"),
    ],
)
def test_mistakes_cost_nothing(run_copy: Path, arguments: list[str], message: str) -> None:
    before = snapshot(run_copy)
    done = call("analyze", run_copy, *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert pytest.importorskip("re").search(message, done.stderr), done.stderr
    assert snapshot(run_copy) == before


def test_mistakes_are_told_before_the_run_is_opened(tmp_path: Path) -> None:
    done = call("analyze", tmp_path / "absent", "--probe", "sign_machting")
    assert "did you mean 'sign_matching'" in done.stderr


def test_what_is_not_a_run(trained: Run, tmp_path: Path) -> None:
    parent = Path(trained.path).parent
    file = tmp_path / "file.txt"
    file.write_text("words")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("words")
    cases = {
        tmp_path / "absent": "absent",
        parent: "folder of runs",
        file: "file",
        tmp_path / "empty": "empty",
        tmp_path / "other": "not a run",
        Path(trained.path) / "trajectory.zarr": "trajectory.zarr",
    }
    for path, message in cases.items():
        for command in (["analyze", path], ["info", path]):
            done = call(*command)
            assert done.exit_code in (2, 3), (path, done.stderr)
            assert message in done.stderr, (path, done.stderr)


def test_a_probe_that_does_not_apply(tmp_path: Path) -> None:
    """Anisotropic covariates: the manifold's theory does not cover them; circuits do."""
    run = tmp_path / "run"
    settings = ["--set", "covariance=[[1, 0.5], [0.5, 1]]", "--steps", 5, "--seeds", 1]
    assert call("train", QUICK, "--out", run, *TINY, *settings).exit_code == 0
    alone = call("analyze", run, "--probe", "solution_manifold")
    assert alone.exit_code == 3
    assert "solution_manifold" in alone.stderr
    assert "covaria" in alone.stderr
    both = call("analyze", run, "--probe", "solution_manifold", "--probe", "circuits", "--no-plot")
    assert both.exit_code == 4
    assert "solution_manifold does not apply" in both.stdout
    assert call("analyze", run, "--no-plot").exit_code == 0


def test_an_unfinished_run_is_analysed_and_said_to_be(tmp_path: Path) -> None:
    from mechicl.training import load_recipe
    from mechicl.training.loop import Progress, train

    def interrupt(progress: Progress) -> None:
        if progress.step >= 50:
            raise KeyboardInterrupt

    recipe = load_recipe(QUICK, {"d": 2, "n_context": 5, "batch_size": 4, "n_steps": 500})
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", compile=False, on_progress=interrupt)
    done = call("analyze", tmp_path / "run", "--probe", "sign_matching", "--no-plot")
    assert done.exit_code == 0
    assert "unfinished run" in done.stderr
    assert "unfinished" in call("info", tmp_path / "run").stdout


def test_a_newer_schema_is_refused(run_copy: Path) -> None:
    path = run_copy / "trajectory.zarr" / "zarr.json"
    text = path.read_text()
    assert '"schema_version": 1' in text
    path.write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    done = call("analyze", run_copy)
    assert done.exit_code == 2
    assert "99" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; lifted for other users")
def test_a_read_only_run_writes_to_out_by_permissions(run_copy: Path, tmp_path: Path) -> None:
    for path in [run_copy, *run_copy.rglob("*")]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    done = call("analyze", run_copy, "--probe", "circuits", "--no-plot")
    assert done.exit_code == 1
    assert "--out" in done.stderr


def test_results_go_to_out_where_the_run_cannot_be_written(run_copy: Path, tmp_path: Path) -> None:
    """A file where the folder of results would be: writing fails as on a read-only mount."""
    (run_copy / "analyses").write_text("in the way")
    done = call("analyze", run_copy, "--probe", "circuits", "--no-plot")
    assert done.exit_code == 1
    assert "--out DIR" in done.stderr
    done = call("analyze", run_copy, "--probe", "circuits", "--out", tmp_path / "elsewhere")
    assert done.exit_code == 0
    assert list((tmp_path / "elsewhere" / "analyses").glob("circuits-*.zarr"))
    assert list((tmp_path / "elsewhere" / "figures").glob("circuits-*.png"))
    assert (run_copy / "analyses").read_text() == "in the way"


def test_train_and_its_refusals(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    settings = [*TINY, "--steps", 20, "--seeds", 2]
    done = call("train", QUICK, "--out", run, *settings)
    assert done.exit_code == 0, done.stderr
    assert "next: mechicl analyze" in done.stdout
    opened = mechicl.open_run(run)
    assert opened.seeds.tolist() == [0, 1]
    assert opened.steps[-1] == 20
    before = snapshot(run)
    for arguments, message in (
        (settings, "--overwrite"),
        ([*settings, "--resume", "--overwrite"], "exclude each other"),
        ([*settings, "--set", "n_steps=3"], "given twice"),
        ([*TINY, "--steps", 30, "--seeds", 2, "--resume"], "n_steps: 20 -> 30"),
    ):
        done = call("train", QUICK, "--out", run, *arguments)
        assert done.exit_code == 2, arguments
        assert message in done.stderr
        assert snapshot(run) == before
    assert call("train", QUICK, "--out", run, *settings, "--resume").exit_code == 0
    assert call("train", QUICK, "--out", run, *settings, "--overwrite").exit_code == 0
    assert mechicl.open_run(run).params.equals(opened.params)


def test_divergence_exits_with_1(tmp_path: Path) -> None:
    done = call(
        "train", QUICK, "--out", tmp_path / "run", *TINY, "--steps", 200, "--seeds", 2,
        "--set", "optimizer.name=sgd", "--set", "learning_rate=1e3",
    )  # fmt: skip
    assert done.exit_code == 1
    assert "diverged at step" in done.stdout
    done = call("analyze", tmp_path / "run", "--set", "approximate_loss.n_prompts=100")
    assert done.exit_code == 0, done.stderr
    assert "undefined: nonfinite parameters" in " ".join(done.stdout.split())


def test_lists(trained: Run) -> None:
    assert QUICK in call("recipes").stdout
    assert "noise_variance: 0.1" in call("recipes", QUICK).stdout
    listed = call("probes").stdout
    assert all(name in listed for name in analyses.names())
    for name in analyses.names():
        shown = call("probes", name)
        assert shown.exit_code == 0
        assert all(key in shown.stdout for key in analyses.get(name).parameters.model_fields)
    assert call("probes", "circuit").exit_code == 2
    told = call("info", trained.path)
    assert told.exit_code == 0
    assert "of 57, complete" in told.stdout


def test_usage_errors_exit_with_2() -> None:
    for arguments in (["analyze"], ["analyse", "x"], ["train", QUICK, "--steps", "0"]):
        assert call(*arguments).exit_code == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_commit_and_exit(tmp_path: Path, number: int, code: int) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "mechicl", "train", QUICK, "--out", str(run), *TINY,
         "--steps", "1000000", "--seeds", "1"],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (run / "trajectory.zarr" / "n_saved").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr
        time.sleep(0.05)
    time.sleep(2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    opened = mechicl.open_run(run)
    assert 0 < opened.trajectory.attrs["n_saved"] < opened.trajectory.attrs["n_planned"]


def test_out_is_chosen_by_the_recipes_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("train", QUICK, *TINY, "--steps", 3, "--seeds", 1).exit_code == 0
    assert (tmp_path / "runs" / QUICK / "config.yaml").is_file()
    shutil.rmtree(tmp_path / "runs")


def test_results_open_without_mechicl(run_copy: Path) -> None:
    call("analyze", run_copy, "--probe", "circuits", "--no-plot")
    (path,) = run_copy.glob("analyses/circuits-*.zarr")
    result = xr.open_zarr(path)
    assert result["KQ"].dims == ("seed", "step", "layer", "head", "d_key", "d_query")
    assert result.attrs["probe"] == "circuits"
