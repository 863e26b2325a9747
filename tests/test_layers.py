"""The house rules: layers, what is imported when, and the wheel."""

import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from mechicl.run import Run

ROOT = Path(__file__).parents[1]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(code: str, *modules: str) -> list[str]:
    """Which of `modules` a fresh process has imported after `code`."""
    check = f"\nimport sys\nprint('imported:', *[m for m in {modules!r} if m in sys.modules])"
    return python(code + check).rpartition("imported:")[2].split()


def test_layers() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command as c; c()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_importing_mechicl_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformer_lens", "xarray", "matplotlib", "zarr")
    assert imported_by("import mechicl", *heavy) == []
    assert imported_by("import torch", *heavy) == ["torch"], "the check itself sees nothing"


def test_help_needs_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys; sys.argv = ['mechicl', '--help']\n"
        "from mechicl.cli import main\n"
        "try: main()\nexcept SystemExit as e: assert e.code == 0"
    )
    assert imported_by(code, "torch", "transformer_lens", "xarray", "numpy") == []
    times = []
    for _ in range(3):
        start = time.perf_counter()
        python(code)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5


def test_trajectory_probes_need_neither_torch_nor_transformer_lens(run_copy: Path) -> None:
    probes = ("sign_matching", "circuits", "solution_manifold")
    chosen = [word for probe in probes for word in ("--probe", probe)]
    code = (
        f"import sys; sys.argv = ['mechicl', 'analyze', {str(run_copy)!r}, *{chosen!r}]\n"
        "from mechicl.cli import main\n"
        "try: main()\nexcept SystemExit as e: assert e.code == 0"
    )
    assert imported_by(code, "torch", "transformer_lens") == []
    for probe in probes:
        assert len(list(run_copy.glob(f"analyses/{probe}-*.zarr"))) == 1, "it did not run"


def test_forward_probes_need_no_transformer_lens(trained: Run) -> None:
    code = (
        f"import mechicl; run = mechicl.open_run({str(trained.path)!r})\n"
        "run.analyze('approximate_loss', n_prompts=100, n_steps=2)"
    )
    assert imported_by(code, "torch", "transformer_lens") == ["torch"]


@pytest.mark.slow
def test_the_wheel_holds_each_module_once(tmp_path: Path) -> None:
    """The links at the root lead into the package; a wheel must not follow them."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert all(name.startswith("mechicl/") for name in names)
    assert max(Counter(names).values()) == 1
    files = [path for path in (ROOT / "mechicl").rglob("*") if path.is_file()]
    package = {str(p.relative_to(ROOT)) for p in files if p.parent.name != "__pycache__"}
    assert package == set(names), "YAML files and templates go with the code"
    assert "mechicl/recipes/he2025-two-head-quick.yaml" in names
