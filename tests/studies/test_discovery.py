"""Which runs are meant: every way to name them, and what is said where there are none."""

from pathlib import Path

import pytest

from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.studies.discovery import find_runs, run_names


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that look like runs, among others; finding opens none."""
    for name in ("runs/b", "runs/a", "runs/deep/er/c", "other/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("recipe: {}")
    (tmp_path / "runs" / "a" / "analyses" / "x.zarr").mkdir(parents=True)
    (tmp_path / "runs" / "notes.txt").write_text("no run")
    (tmp_path / "config.yaml").write_text("of: another program\n# recipe:\n")
    (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    (tmp_path / "empty" / ".hidden" / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(found: list) -> list[str]:
    return [str(Path(path).relative_to(Path.cwd())) for path in found]


ALL = ["runs/a", "runs/b", "runs/deep/er/c"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["runs/b"], ["runs/b"]),
        (["runs"], ALL),
        (["runs/*"], ALL),
        (["runs/[ab]"], ALL[:2]),
        (["runs/b", "runs/a"], ALL[:2]),
        ("runs/a", ["runs/a"]),
        (Path("runs/a"), ["runs/a"]),
        (["other", "runs/b"], ["other/a", "runs/b"]),
    ],
)
def test_ways_to_name_runs(root: Path, given: object, found: list[str]) -> None:
    assert names(find_runs(given)) == found


def test_two_stars_look_at_any_depth_and_into_no_run(root: Path) -> None:
    assert names(find_runs(["**/*"])) == ["other/a", *ALL]
    assert names(find_runs(["runs/**"])) == ALL


def test_found_paths_are_absolute(root: Path) -> None:
    assert find_runs(["runs/a"]) == [root / "runs" / "a"]


def test_urls_are_taken_as_they_are() -> None:
    assert find_runs(["memory://runs/a/"]) == ["memory://runs/a"]


def test_a_list_has_comments_patterns_and_paths_relative_to_itself(root: Path) -> None:
    file = root / "runs" / "list.txt"
    file.write_text("# the runs\n\na  # the first\ndeep/*\n../other/a\n")
    assert names(find_runs([file])) == ["other/a", "runs/a", "runs/deep/er/c"]


def test_a_list_of_windows_is_read_too(root: Path) -> None:
    (root / "list.txt").write_bytes("\ufeffruns/a\r\n\r\nruns/b  # ours\r\n".encode())
    assert names(find_runs(["list.txt"])) == ALL[:2]


def test_folders_that_look_like_patterns_stand_for_themselves(root: Path) -> None:
    folder = root / "seeds [0-3] *"
    (root / "runs").rename(folder)
    (folder / "list.txt").write_text("[ab]\n")
    found = [folder / "a", folder / "b"]
    assert find_runs([folder / "list.txt"]) == found
    assert find_runs(["seeds [0-3] */[ab]"]) == found
    assert find_runs([str(folder / "**")]) == [*found, folder / "deep" / "er" / "c"]


def test_a_run_given_twice_is_kept_once_and_told(root: Path) -> None:
    (root / "link").symlink_to(root / "runs" / "a")
    with pytest.warns(UserWarning, match=r"kept once: .*link|kept once: .*runs/a"):
        assert len(find_runs(["link", "runs/a", "runs/b"])) == 2
    told: list[str] = []
    find_runs(["runs/a", "runs/b"], notify=told.append)
    assert told == []


def test_links_to_runs_below_a_folder_are_followed_and_others_are_not(root: Path) -> None:
    (root / "links").mkdir()
    (root / "links" / "run").symlink_to(root / "runs" / "a")
    (root / "links" / "loop").symlink_to(root)
    assert names(find_runs(["links"])) == ["links/run"]


def test_a_folder_that_matches_and_holds_no_run_is_told(root: Path) -> None:
    told: list[str] = []
    find_runs(["*"], notify=told.append)
    assert told == ["no run in empty"]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ([], InputError, "no runs were given"),
        (["absent"], InputError, "there is no absent; give a run"),
        (["runs/a/config.yaml"], InputError, "give its directory, runs/a"),
        (["empty"], NothingToAnalyseError, "there is no run in empty"),
        (["nothing/*"], NothingToAnalyseError, "no run matches 'nothing/.': of 0 matches"),
        (["runs/*.txt"], NothingToAnalyseError, "of 1 matches, 0 are folders"),
        (["runs/notes.txt"], InputError, r"there is no runs/no run \(in runs/notes.txt\)"),
        ([""], InputError, "cannot be empty"),
        (["x" * 300], InputError, "x cannot be read: File name too long"),
        (["/dev/null"], InputError, "/dev/null is neither a folder nor a file"),
        ([3], InputError, "a path is text"),
    ],
)
def test_what_is_no_run_is_said(root: Path, given: list, error: type, said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        find_runs(given)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (b"\xff\xfe\x00", InputError, "is no list of runs"),
        (b"# nothing\n", NothingToAnalyseError, "names no run"),
        (b"list.txt\n", InputError, "a list has run directories and patterns"),
    ],
)
def test_a_list_that_is_none(root: Path, content: bytes, error: type, said: str) -> None:
    (root / "list.txt").write_bytes(content)
    with pytest.raises(error, match=said):
        find_runs(["list.txt"])


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/x/a", "/x/b"], ["a", "b"]),
        (["/x/a", "/y/a", "/x/b"], ["x/a", "y/a", "b"]),
        (["/p/x/a", "/q/x/a", "/q/y/a"], ["p/x/a", "q/x/a", "y/a"]),
        (["/a", "/x/a"], ["/a", "x/a"]),
        (["memory://x/a", "/y/b"], ["a", "b"]),
    ],
)
def test_names_are_the_shortest_that_differ(paths: list[str], expected: list[str]) -> None:
    assert run_names(paths) == expected
