"""The gallery: every script draws its figure, and the index has each of them."""

import ast
import re
import runpy
import struct
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from mechicl.plots import style
from mechicl.studies.reproduce import run_directory
from mechicl.training import load_recipe

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
SHARED = "gallery"
SCRIPTS = sorted(path for path in GALLERY.glob("*.py") if path.stem != SHARED)

FIGURES = {
    "he2025": "01 03 04 05 06 07 08 09 10 11 12 14 15 18_19",
    "raj2026": "02b 04a 04b 04cd",
    "yuksel2026": "01 02 03 04 05 10",
}
"""Those of the papers that show numbers: the others are schemes."""

MAY_IMPORT = {"mechicl", "numpy", "xarray", "matplotlib"} | sys.stdlib_module_names


def run(script: Path, *words: object) -> None:
    """Run a script as `python SCRIPT WORDS` does, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GALLERY)
        patch.setattr(sys, "argv", [str(script), *map(str, words)])
        for each in GALLERY.glob("*.py"):
            patch.delitem(sys.modules, each.stem, raising=False)
        runpy.run_path(str(script), run_name="__main__")


def picture(path: Path) -> tuple[int, int]:
    """Return width and height of a PNG; fail for what is none."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n", path
    return struct.unpack(">II", head[16:])


def rows() -> dict[str, str]:
    """Return the rows of the index by the script that each links to."""
    page = (GALLERY / "README.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("|") and ".py)" in line]
    linked = [re.findall(r"\]\(([^)]+)\.py\)", line) for line in lines]
    assert all(len(names) == 1 for names in linked), "a row links to one script"
    found = {names[0]: line for names, line in zip(linked, lines, strict=True)}
    assert len(found) == len(lines), "a script has two rows"
    return found


def test_there_is_a_script_for_every_figure() -> None:
    wanted = {f"{paper}_fig{name}" for paper, names in FIGURES.items() for name in names.split()}
    assert len(wanted) == 24
    assert {script.stem for script in SCRIPTS} == wanted


def test_the_index_has_every_figure_and_no_other() -> None:
    found = rows()
    assert set(found) == {script.stem for script in SCRIPTS}
    assert {path.stem for path in GALLERY.glob("*.png")} == set(found)
    for name, line in found.items():
        assert f'<img src="{name}.png"' in line


def test_figures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in GALLERY.glob("*.png")}
    assert len(sizes) == len(SCRIPTS)
    assert {name: size for name, size in sizes.items() if size > 70_000} == {}
    assert sum(sizes.values()) < 1_500_000
    for name in sizes:
        width, height = picture(GALLERY / name)
        assert 400 <= width <= 1300
        assert height <= 1000


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_teach_the_public_interface(script: Path) -> None:
    tree = ast.parse(script.read_text())
    siblings = {SHARED, *(path.stem for path in SCRIPTS)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
            assert not any(alias.name.startswith("_") for alias in node.names)
        for name in names:
            assert name.partition(".")[0] in MAY_IMPORT | siblings, name
            assert not any(part.startswith("_") for part in name.split("."))
    about = ast.get_docstring(tree) or ""
    paper, _, number = script.stem.partition("_fig")
    figure = int(re.findall(r"\d+", number)[0])
    assert re.match(rf"{paper}, Figs?\. ?{figure}\b|{paper}, Figs {figure}\b", about)
    assert "\nPublished: " in about, "what the paper's figure shows"
    assert "\nOurs: " in about, "what ours shows, at what size, and what differs"
    assert len(script.read_text().splitlines()) <= 90


@pytest.mark.parametrize("name", ["he2025_fig07", "yuksel2026_fig10"])
def test_a_figure_of_theory_is_drawn(name: str, tmp_path: Path) -> None:
    run(GALLERY / f"{name}.py", "--quick", "--runs", tmp_path / "runs", "--out", tmp_path)
    assert picture(tmp_path / f"{name}.png")[0] > 400
    assert not (tmp_path / "runs").exists(), "it needs no training"


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that scripts share."""
    monkeypatch.syspath_prepend(GALLERY)
    monkeypatch.delitem(sys.modules, SHARED, raising=False)
    return import_module(SHARED)


def test_what_is_only_tried_says_so(gallery: ModuleType, tmp_path: Path) -> None:
    for quick in (False, True):
        figure = style.figure(1, 1)
        style.title(figure, "a title")
        gallery.save(figure, tmp_path / "x.png", gallery.Runs(tmp_path, quick=quick))
        assert "a title" in figure.get_suptitle()
        assert ("this figure means nothing" in figure.get_suptitle()) == quick


def test_runs_are_those_of_reproduce(
    gallery: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(gallery, "trained", lambda recipe, place, *_: asked.append(place))
    gallery.Runs(tmp_path).trained("he2025-multi-task", n_heads=3)
    gallery.Runs(tmp_path, seeds=2).trained("he2025-multi-task", n_heads=3)
    recipe = load_recipe("he2025-multi-task", {"n_heads": 3})
    fewer = load_recipe(recipe, {"seeds": [0, 1]})
    assert asked == [run_directory(each, tmp_path) for each in (recipe, fewer)]
    assert asked[0] != asked[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0"], "--seeds is a number from 1; given 0"),
        (["--scale", "papr"], "there is no scale of recipe 'he2025-four-head' 'papr'; did you"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--out", __file__], "test_gallery.py is not a directory; give another path"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(GALLERY / "he2025_fig14.py", "--runs", tmp_path, "--out", tmp_path, *words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of all scripts are, for some need the same."""
    return tmp_path_factory.mktemp("gallery")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_draws_its_figure(script: Path, tried: Path) -> None:
    run(script, "--quick", "--runs", tried, "--out", tried / "figures")
    width, height = picture(tried / "figures" / f"{script.stem}.png")
    assert min(width, height) > 200
