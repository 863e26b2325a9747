"""`mechicl report`: what it prints, where the page goes, its exit codes."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import mechicl
from mechicl.cli import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_page_is_named_with_its_size(run_dir: Path) -> None:
    done = call(run_dir, "--probe", "circuits", "--no-attention")
    assert done.exit_code == 0, done.stderr
    page = run_dir / "report.html"
    assert done.stdout == f"{page} ({page.stat().st_size / 1e6:.1f} MB)\n"
    assert done.stderr == ""
    assert len(list(run_dir.glob("analyses/circuits-*.zarr"))) == 1
    assert len(list(run_dir.glob("figures/circuits-*.png"))) == 1


def test_what_was_not_computed_is_said(run_dir: Path, tmp_path: Path) -> None:
    done = call(run_dir, "--no-attention", "--out", tmp_path / "deep" / "page.html")
    assert done.exit_code == 0
    assert (tmp_path / "deep" / "page.html").exists()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("not computed: ")]
    assert "approximate_loss" in line
    assert "--forward" in line


def test_probes_that_do_not_apply_are_partly_done_or_nothing(run_dir: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "page.html", "--no-attention")
    assert call(run_dir, "--probe", "circuits", "--probe", "routing", *out).exit_code == 4
    done = call(run_dir, "--probe", "routing", *out)
    assert done.exit_code == 3
    assert "'routing' does not apply: the run has no" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--probe", "circuit"], "did you mean 'circuits'"),
        (["--out", "page.pdf"], "ends in .html"),
        (["--out", "s3://bucket/page.html"], "is a URL"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_read(
    run_dir: Path, arguments: list[str], said: str
) -> None:
    done = call(run_dir, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(("path", "code"), [("absent", 2), ("empty", 3)])
def test_what_is_no_run_is_refused(tmp_path: Path, path: str, code: int) -> None:
    (tmp_path / "empty").mkdir()
    done = call(tmp_path / path)
    assert (done.exit_code, done.stdout) == (code, "")
    assert str(tmp_path / path) in done.stderr


def test_a_damaged_run_is_a_fault(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    for path in copy.glob("trajectory.zarr/W_Q/c/**/*"):
        if path.is_file():
            path.unlink()
    done = call(copy, "--out", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "W_Q" in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_study_has_a_page_too(run_dir: Path, tmp_path: Path) -> None:
    study = tmp_path / "two.zarr"
    mechicl.study(run_dir, ["circuits"], out=study, figures=False)
    done = call(study)
    assert done.exit_code == 0, done.stderr
    page = tmp_path / "two-report.html"
    assert done.stdout == f"{page} ({page.stat().st_size / 1e6:.1f} MB)\n"
    done = call(study, "--probe", "routing")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no probe in this study 'routing'" in done.stderr
