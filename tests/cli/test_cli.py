"""The shell: what it prints, what it writes, its exit codes, and that a mistake costs nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner, Result

import mechicl
from mechicl import analyses
from mechicl.cli import app, printing, settings
from mechicl.run import Run
from tests import trajectories
from tests.users import nobody

QUICK = "he2025-two-head-quick"
TINY = ["--set", "d=2", "--set", "n_context=5", "--set", "batch_size=16", "--no-compile"]
FEW_PROMPTS = [
    part
    for name in analyses.names()
    if "n_prompts" in analyses.get(name).parameters.model_fields
    for part in ("--set", f"{name}.n_prompts=200")
]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shell(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    """Run mechicl in a process of its own, where the streams are real ones."""
    command = [sys.executable, "-m", "mechicl", *map(str, arguments)]
    given = {"capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run(command, check=False, **given)


def row(text: str, *cells: str) -> list[str]:
    """The cells of the one line of a table that begins with `cells`, without these."""
    split = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()
    ]
    (found,) = [line for line in split if line[: len(cells)] == list(cells)]
    return found[len(cells) :]


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
    done = call("analyze", run_copy, "--no-plot", *FEW_PROMPTS)
    assert done.exit_code == 0, done.stderr
    run, applied = mechicl.open_run(run_copy), 0
    for name in analyses.names():
        assert name in done.stdout
        applies = run.objection(name) is None
        assert len(list(run_copy.glob(f"analyses/{name}-*.zarr"))) == applies
        assert (f"{name} does not apply" in done.stdout) == (not applies)
        applied += applies
    assert 7 <= applied < len(analyses.names())
    assert not (run_copy / "figures").exists()


def test_tables_show_each_seed_at_the_last_step(run_copy: Path) -> None:
    done = call("analyze", run_copy, "--probe", "solution_manifold", "--no-plot")
    result = mechicl.open_run(run_copy).analyze("solution_manifold")
    since = f"since {result['since'].values[0]:,.0f}"
    assert row(done.stdout, "solution_manifold", since) == ["no"]
    assert row(done.stdout, "eta") == [f"{value:.3g}" for value in result["eta"].values[:, -1]]


@pytest.fixture(scope="module")
def nine_seeds() -> xr.Dataset:
    """Five seeds match signs from step 0, 10, 20, 30, 30; three never do; one has no live head."""
    steps, starts = np.arange(4), [0, 1, 2, 3, 3, 9, 9, 9]
    good = np.array([[step >= start for step in steps] for start in starts])
    omega = np.full((9, 4, 2), 0.2) * [1, -1]
    mu = np.full((9, 4, 2), 2.0) * [1, -1]
    mu[:8] *= np.where(good, 1, -1)[..., None]
    omega[8] = mu[8] = 0.0
    return trajectories.from_scales(omega, mu)


def tables(capsys: pytest.CaptureFixture, trajectory: xr.Dataset, *names: str) -> str:
    results = {name: analyses.get(name)(trajectory) for name in names}
    printing.print_tables(results, {name: [] for name in names}, {})
    return capsys.readouterr().out


def test_many_seeds_are_counted(nine_seeds: xr.Dataset, capsys: pytest.CaptureFixture) -> None:
    out = tables(capsys, nine_seeds, "sign_matching")
    assert row(out, "sign_matching", "5") == ["3", "1", "20"]


def test_over_many_seeds_variables_by_head_are_left_out(
    nine_seeds: xr.Dataset, capsys: pytest.CaptureFixture
) -> None:
    """No median sums heads up; each that is left tells how many seeds have a value."""
    records = {name: analyses.get(name) for name in analyses.names()}
    names = [
        name
        for name, record in records.items()
        if not record.forward and record.objection(nine_seeds) is None
    ]
    many, few = (
        tables(capsys, trajectory, *names)
        for trajectory in (nine_seeds, nine_seeds.isel(seed=slice(4, 9)))
    )
    left_out = kept = 0
    for name in names:
        result = analyses.get(name)(nine_seeds)
        for variable in analyses.get(name).headline:
            assert re.search(rf"\b{variable}\b", few.split("key figures")[1])
            if "head" in result[variable].dims:
                assert not re.search(rf"\b{variable}\b", many.split("key figures")[1])
                left_out += 1
            else:
                defined = int(np.isfinite(result[variable].values[:, -1]).sum())
                lines = many.split("key figures")[1].splitlines()
                (line,) = [line for line in lines if variable in line.split()]
                assert f"{defined} of 9" in line
                kept += 1
    assert (left_out >= 1, kept >= 1) == (True, True)


def test_what_is_undefined_says_why_and_never_nan(
    nine_seeds: xr.Dataset, capsys: pytest.CaptureFixture
) -> None:
    few = nine_seeds.isel(seed=[0, 8])
    few = trajectories.poison(few, seed=0, from_index=2)
    for name in ("sign_matching", "solution_manifold"):
        figures = tables(capsys, few, name).split("key figures")[1]
        assert "undefined: nonfinite parameters" in figures
        assert re.search(r"undefined: (?!nonfinite)\w+", figures)
        assert "nan" not in figures.lower()


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


def test_settings_go_to_the_probe_that_they_name(run_copy: Path) -> None:
    done = call(
        "analyze", run_copy, "--probe", "sign_matching", "--probe", "zero_sum_ov", "--json",
        "--no-plot", "--set", "zero-sum-ov.tolerance=0.5",
        "--set", "sign-matching.dummy-threshold=0.3",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    probes = json.loads(done.stdout)["probes"]
    assert probes["zero_sum_ov"]["parameters"] == {"tolerance": 0.5}
    assert probes["sign_matching"]["parameters"] == {"dummy_threshold": 0.3}


def test_by_probe_keeps_probes_apart() -> None:
    given = {"a.x": 1, "b.x": 2, "b.some-key": 3}
    expected = {"a": {"x": 1}, "b": {"x": 2, "some_key": 3}, "c": {}}
    assert settings.by_probe(given, ["a", "b", "c"]) == expected
    assert settings.by_probe({"x": 1}, ["b"]) == {"b": {"x": 1}}


def test_values_are_read_as_yaml_and_numbers() -> None:
    read = settings.parse(
        ["a=1e-3", "b=7", "c=[1, 2]", "d=null", "e=adamw", "f=x=y", "g=true", "h=-2E4"]
    )
    assert read == {
        "a": 0.001, "b": 7, "c": [1, 2], "d": None, "e": "adamw", "f": "x=y", "g": True, "h": -2e4
    }  # fmt: skip
    assert isinstance(read["b"], int)


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
        (["--probe", "zero_sum_ov", "--set", "tolerance=true"], "tolerance: .*True"),
        (
            [
                "--probe", "sign_matching", "--set", "dummy_threshold=0.1",
                "--set", "sign_matching.dummy-threshold=0.2",
            ],
            "gives sign_matching.dummy_threshold twice",
        ),
        (["--probe", "circuits", "--step", "3333"], "3333 is not stored"),
        (["--probe", "circuits", "--out", ""], "empty"),
        (["--probe", "circuits", "--out", "memory://x"], "only local directories"),
        (["--probe", "circuits", "--seed", "1"], r"it has \[0, 3\]"),
    ],
)  # fmt: skip
def test_mistakes_cost_nothing(run_copy: Path, arguments: list[str], message: str) -> None:
    before = snapshot(run_copy)
    done = call("analyze", run_copy, *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert re.search(message, done.stderr), done.stderr
    assert snapshot(run_copy) == before


def test_mistakes_are_told_before_the_run_is_opened(tmp_path: Path) -> None:
    done = call("analyze", tmp_path / "absent", "--probe", "sign_machting")
    assert done.exit_code == 2
    assert "did you mean 'sign_matching'" in done.stderr


@pytest.mark.parametrize("command", ["analyze", "info"])
def test_an_empty_path_is_refused(command: str) -> None:
    done = call(command, "")
    assert done.exit_code == 2
    assert "empty" in done.stderr


def test_results_are_not_computed_for_a_place_that_cannot_be(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.txt"
    file.write_text("mine")

    def computed(*_: object, **__: object) -> None:
        raise AssertionError("computed first")

    monkeypatch.setattr(Run, "analyze", computed)
    done = call("analyze", run_copy, "--probe", "circuits", "--out", file)
    assert done.exit_code == 2, done.exception
    assert f"{file} is not a directory" in done.stderr
    assert file.read_text() == "mine"


@pytest.mark.parametrize("command", ["analyze", "info"])
@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("absent", 2, "there is no {path}"),
        ("runs", 2, "{path} is a folder of runs; give one of them: {path}/trained"),
        ("file.txt", 2, "{path} is a file; give the directory of a run"),
        ("empty", 3, "{path} is empty; train a run into it first"),
        ("other", 2, "{path} is not a run"),
        ("runs/trained/trajectory.zarr", 2, "give the run itself: {run}"),
    ],
)
def test_what_is_not_a_run(
    trained: Run, tmp_path: Path, command: str, case: str, code: int, message: str
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "trained").symlink_to(trained.path)
    (tmp_path / "file.txt").write_text("words")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("words")
    done = call(command, tmp_path / case)
    assert done.exit_code == code, done.stderr
    expected = message.format(path=tmp_path / case, run=tmp_path / "runs" / "trained")
    assert expected in done.stderr
    assert done.stdout == ""


def test_a_probe_that_does_not_apply(tmp_path: Path) -> None:
    """Anisotropic covariates: the manifold's theory does not cover them; circuits do."""
    run = tmp_path / "run"
    settings = ["--set", "covariance=[[1, 0.5], [0.5, 1]]", "--steps", 5, "--seeds", 1]
    assert call("train", QUICK, "--out", run, *TINY, *settings).exit_code == 0
    alone = call("analyze", run, "--probe", "solution_manifold")
    assert alone.exit_code == 3
    assert "solution_manifold" in alone.stderr
    assert "covaria" in alone.stderr
    able = alone.stderr.partition("probes that do: ")[2].split(", ")
    assert "circuits" in able
    assert not {"solution_manifold", "attention_spans"} & {*able}
    both = call("analyze", run, "--probe", "solution_manifold", "--probe", "circuits", "--no-plot")
    assert both.exit_code == 4
    assert "solution_manifold does not apply" in both.stdout
    assert call("analyze", run, "--no-plot", *FEW_PROMPTS).exit_code == 0


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


def test_a_read_only_run_writes_to_out_by_permissions(trained: Run) -> None:
    asked = ["--probe", "circuits", "--no-plot"]
    # Not in tmp_path, into which no other user may look.
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder) / "run", Path(folder) / "out"
        shutil.copytree(trained.path, run)
        first = call("analyze", run, *asked, "--out", out)  # imports what nobody may not
        assert first.exit_code == 0, first.stderr
        Path(folder).chmod(0o755)
        for path in [run, *run.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        out.chmod(0o777)
        (out / "analyses").chmod(0o777)
        with nobody():
            done = call("analyze", run, *asked)
            elsewhere = call("analyze", run, *asked, "--seed", 3, "--out", out)
        assert done.exit_code == 1
        assert str(run) in done.stderr and "--out DIR" in done.stderr
        assert elsewhere.exit_code == 0, elsewhere.stderr
        assert len(list((out / "analyses").glob("circuits-*.zarr"))) == 2


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


def test_train_takes_sections_and_mappings(tmp_path: Path) -> None:
    """A section replaces the recipe's, a setting that was null becomes a mapping, both are told."""
    run = tmp_path / "run"
    section = "model={name: normalized_attention, activation: square}"
    given = [*TINY, "--steps", 5, "--seeds", 1, "--set", section, "--set", "covariance={rho: 0.5}"]
    done = call("train", QUICK, "--out", run, *given, "--set", "n_heads=3")
    assert done.exit_code == 0, done.stderr
    recipe = mechicl.open_run(run).recipe
    assert (recipe.model.activation, recipe.model.n_heads) == ("square", 3)
    np.testing.assert_allclose(mechicl.open_run(run).trajectory["covariance"], [[1, 0.5], [0.5, 1]])
    refused = 0
    for more, message in (
        (["--set", "n_heads=3", "--resume", "--set", "rho=0.1"], "there is no setting 'rho'"),
        (["--resume"], "model.n_heads: 3 -> 2"),
        (["--set", "model=linear_attention"], "--set gives model twice"),
    ):
        done = call("train", QUICK, "--out", run, *given, *more)
        assert done.exit_code == 2, more
        assert message in done.stderr
        refused += 1
    plain = [*TINY, "--steps", 5, "--seeds", 1, "--resume", "--set", section, "--set", "n_heads=3"]
    done = call("train", QUICK, "--out", run, *plain)
    assert "task.covariance: {'rho': 0.5} -> None" in done.stderr
    word = call("train", QUICK, "--out", tmp_path / "no", "--set", "model=linear_attention")
    assert word.exit_code == 2
    assert "model is a section" in word.stderr
    assert refused == 3


def test_train_and_its_refusals(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    given = [*TINY, "--steps", 20, "--seeds", 2]
    done = call("train", QUICK, "--out", run, *given)
    assert done.exit_code == 0, done.stderr
    assert "next: mechicl analyze" in done.stdout
    opened = mechicl.open_run(run)
    assert opened.seeds.tolist() == [0, 1]
    assert opened.steps[-1] == 20
    before, refused = snapshot(run), 0
    for arguments, message in (
        (given, "--overwrite"),
        ([*given, "--resume", "--overwrite"], "exclude each other"),
        ([*given, "--set", "n_steps=3"], "given twice"),
        ([*given, "--set", "task.d=3"], "set twice"),
        ([*given, "--set", "n_heads=true"], "model.n_heads: "),
        ([*TINY, "--steps", 30, "--seeds", 2, "--resume"], "n_steps: 20 -> 30"),
    ):
        done = call("train", QUICK, "--out", run, *arguments)
        assert done.exit_code == 2, arguments
        assert message in done.stderr
        assert snapshot(run) == before
        refused += 1
    assert refused == 6
    assert call("train", QUICK, "--out", run, *given, "--resume").exit_code == 0
    assert snapshot(run) == before
    other = [*TINY, "--steps", 10, "--seeds", 1]
    assert call("train", QUICK, "--out", run, *other, "--overwrite").exit_code == 0
    replaced = mechicl.open_run(run)
    assert (replaced.seeds.tolist(), replaced.steps[-1]) == ([0], 10)


@pytest.mark.parametrize(
    ("out", "settings", "message"),
    [
        ("run", ["--device", "gpu"], "auto, cpu, cuda; given 'gpu'"),
        ("s3://bucket/run", [], "only local directories are written"),
        ("memory://run", [], "only local directories are written"),
        ("", [], "empty"),
        ("run", ["--set", "model.n_heads=1000000000000"], ""),
        ("run", ["--set", "score_scale=1", "--set", "model.score-scale=1"], "set twice"),
        ("run", ["--steps", "1000000000000"], ""),
    ],
)
def test_what_cannot_be_trained_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, settings: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("train", QUICK, "--out", out, *TINY, *settings)
    assert done.exit_code == 2, done.exception
    assert done.stderr.startswith("mechicl: ")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_width_beyond_the_disk_is_refused(tmp_path: Path) -> None:
    done = call("train", QUICK, "--out", tmp_path / "run", "--no-compile", "--set", "d=1000000")
    assert done.exit_code == 2, done.exception
    assert not (tmp_path / "run").exists()


def test_progress_goes_to_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mechicl.cli.progress._LINE_SECONDS", 0.0)
    done = call("train", QUICK, "--out", tmp_path / "run", *TINY, "--steps", 20, "--seeds", 2)
    assert done.exit_code == 0, done.exception
    assert "step 20 of 20, loss " in done.stderr
    assert "seed-steps/s" in done.stderr
    assert "step 20 of" not in done.stdout


def test_divergence_exits_with_1(tmp_path: Path) -> None:
    done = call(
        "train", QUICK, "--out", tmp_path / "run", *TINY, "--steps", 200, "--seeds", 2,
        "--set", "optimizer.name=sgd", "--set", "learning_rate=1e3",
    )  # fmt: skip
    assert done.exit_code == 1
    assert re.findall(r"seed (\d) diverged at step", done.stdout) == ["0", "1"]
    done = call("analyze", tmp_path / "run", *FEW_PROMPTS)
    assert done.exit_code == 0, done.stderr
    assert not re.search(r"\bnan\b", done.stdout, re.IGNORECASE)
    assert "undefined: nonfinite parameters" in " ".join(done.stdout.split())


def test_lists(trained: Run) -> None:
    assert QUICK in call("recipes").stdout
    assert "noise_variance: 0.1" in call("recipes", QUICK).stdout
    listed, checked = call("probes").stdout, 0
    for name in analyses.names():
        assert name in listed
        shown = call("probes", name)
        assert shown.exit_code == 0
        parameters = " ".join(shown.stdout.split()).split("parameters (--set")[1]
        for key, value in analyses.get(name).resolve({}).items():
            assert f"{key} " in parameters, (name, key)
            assert f" {value} " in parameters, (name, key)
            checked += 1
    assert checked >= 5
    assert call("probes", "circuit").exit_code == 2
    told = call("info", trained.path)
    assert told.exit_code == 0
    assert "of 57, complete" in told.stdout


def test_info_tells_the_loss_of_the_last_hundred_steps(trained: Run) -> None:
    loss = mechicl.open_run(trained.path).metrics["loss"].values[:, -100:].mean(1)
    assert f"0: {loss[0]:.4f}, 3: {loss[1]:.4f}" in call("info", trained.path).stdout


def test_info_does_without_versions_that_are_none(run_copy: Path) -> None:
    path = run_copy / "config.yaml"
    path.write_text(path.read_text().replace("versions:", "versions: lost\nbefore:"))
    told = call("info", run_copy)
    assert told.exit_code == 0, told.stderr
    assert "mechicl None" in told.stdout


def test_info_tells_which_probes_apply(tmp_path: Path) -> None:
    run, slanted = tmp_path / "run", ["--set", "covariance=[[1, 0.5], [0.5, 1]]"]
    call("train", QUICK, "--out", run, *TINY, *slanted, "--steps", 5, "--seeds", 1)
    told = call("info", run).stdout
    assert row(told, "circuits") == ["yes"]
    assert row(told, "solution_manifold")[0].startswith("no: its closed forms assume isotropic")


@pytest.mark.parametrize(
    "arguments", [["analyze"], ["analyse", "x"], ["train", QUICK, "--steps", "0"]]
)
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    assert call(*arguments).exit_code == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_commit_say_so_and_exit(tmp_path: Path, number: int, code: int) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "mechicl", "train", QUICK, "--out", str(run), *TINY,
         "--steps", "100000", "--seeds", "1"],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (run / "trajectory.zarr" / "n_saved").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, errors
    attrs = mechicl.open_run(run).trajectory.attrs
    assert 0 < attrs["n_saved"] < attrs["n_planned"]
    assert f"{attrs['n_saved']} of {attrs['n_planned']} checkpoints are in {run}" in errors
    assert "--resume goes on" in errors
    assert "Traceback" not in errors


def closed_pipe() -> int:
    """A descriptor to write to that nobody reads, as `| head -1` leaves it."""
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("arguments", [["probes", "circuits"], ["recipes"], ["analyze"]])
def test_output_that_nobody_reads_is_no_fault(run_copy: Path, arguments: list[str]) -> None:
    if arguments == ["analyze"]:
        arguments = ["analyze", str(run_copy), "--probe", "circuits", "--no-plot"]
    pipe = closed_pipe()
    try:
        done = shell(*arguments, capture_output=False, stdout=pipe, stderr=subprocess.PIPE)
    finally:
        os.close(pipe)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE
    assert len(list(run_copy.glob("analyses/circuits-*.zarr"))) == (arguments[0] == "analyze")


@pytest.mark.parametrize("command", ["probes circuits", "analyze {run} --probe circuits --no-plot"])
def test_a_closed_standard_output_is_no_fault(run_copy: Path, command: str) -> None:
    closed = f"{sys.executable} -m mechicl {command.format(run=run_copy)} >&-"
    done = subprocess.run(
        closed, shell=True, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_greek_gets_replacements() -> None:
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = shell("probes", "circuits", env=os.environ | plain)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "?" in done.stdout
    assert "KQ" in done.stdout


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


@pytest.mark.parametrize("damage", ["altered", "missing"])
def test_damage_is_named_or_gone_around(run_copy: Path, damage: str) -> None:
    chunk = run_copy / "trajectory.zarr/W_V/c/0/0/0/0/0/0"
    if damage == "missing":
        chunk.unlink()
    else:
        data = bytearray(chunk.read_bytes())
        data[100] ^= 1
        chunk.write_bytes(data)
    refused = call("analyze", run_copy, "--probe", "sign_matching", "--no-plot")
    assert refused.exit_code == 1
    assert "W_V/c/0/0/0/0/0/0" in refused.stderr
    assert "--skip-damaged" in refused.stderr
    done = call("analyze", run_copy, "--probe", "sign_matching", "--no-plot", "--skip-damaged")
    assert done.exit_code == 0, done.stderr
    assert "left out as NaN" in done.stderr
    assert "undefined: nonfinite parameters" in done.stdout
