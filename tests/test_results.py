"""What is written aside is whole or absent, and takes the place of what was there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mechicl.results import write_aside


def folder_of(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir()
        (path / "a").write_text(text)

    return write


def test_a_folder_and_a_file_take_the_place_of_what_was_there(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_aside(tmp_path / "x" / "folder", folder_of(text))
        write_aside(tmp_path / "x" / "file", lambda path, text=text: path.write_text(text))
        assert (tmp_path / "x" / "folder" / "a").read_text() == text
        assert (tmp_path / "x" / "file").read_text() == text
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["file", "folder"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for name in ("folder", "file"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    for text in ("first", "second"):
        write_aside(tmp_path / "folder", folder_of(text))
        write_aside(tmp_path / "file", lambda path, text=text: path.write_text(text))
        assert (tmp_path / "disk" / "folder" / "a").read_text() == text
        assert (tmp_path / "disk" / "file").read_text() == text
    assert (tmp_path / "folder").is_symlink() and (tmp_path / "file").is_symlink()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("failing", ["write", "replace"])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    write_aside(tmp_path / "folder", folder_of("first"))

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    if failing == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_aside(tmp_path / "folder", folder_of("second") if failing == "replace" else fail)
    assert (tmp_path / "folder" / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
