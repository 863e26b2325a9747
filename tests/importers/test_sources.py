"""Which file is of which step: spellings, fields, seeds, and what cannot be told."""

import re
from pathlib import Path

import pytest

from mechicl.errors import InputError
from mechicl.importers.files import read_state
from mechicl.importers.sources import find


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not looked into")
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("step-000500.pt", "step-001000.pt"),
        ("checkpoint_500.safetensors", "checkpoint_1000.safetensors"),
        ("model.500.bin", "model.1000.bin"),
        ("ckpt500.pth", "ckpt1000.pth"),
        ("500.pt", "1000.pt"),
        ("gpt2-epoch3-step=500.ckpt", "gpt2-epoch4-step=1000.ckpt"),
        ("run7_iter_500.pt", "run7_iter_1000.pt"),
        ("global_step500.pt", "global_step1000.pt"),
        ("Step 500.pt", "Step 1000.pt"),
        ("checkpoint-500/model.safetensors", "checkpoint-1000/pytorch_model.bin"),
        ("checkpoint-500/model.safetensors", "checkpoint-500/optimizer.pt", "checkpoint-1000/x.pt"),
    ],
)
def test_the_step_is_found_in_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    touch(tmp_path, *names, "optimizer.pt", "log.csv", ".hidden-7.pt", "notes-3.txt")
    found = find(tmp_path)
    assert found.steps == (500, 1000)
    wanted = sorted(tmp_path / name for name in names if "optimizer" not in name)
    assert sorted(found.files[0]) == wanted


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no checkpoints: no file, and no folder with a file, that ends in .safetensors"),
        (["readme.txt"], "has no checkpoints"),
        (["step-1.pt", "final.pt"], "final.pt has no step in its name"),
        (["step-1.5.pt"], "the step in step-1.5.pt cannot be told: it has 1, 5"),
        (["step-1e3.pt"], "the step in step-1e3.pt cannot be told: it has 1e3"),
        (["step-5k.pt"], "cannot be told: it has 5k"),
        (["a-1-b-2.pt"], "the step in a-1-b-2.pt cannot be told: it has 1, 2"),
        (["epoch-3.pt"], "epoch-3.pt counts epochs, not steps"),
        (["step-5.pt", "step-005.bin"], "step 5 is there 2 times: step-005.bin, step-5.pt"),
        (["step-99999999.pt"], "steps are updates, from 0 to 16,777,216; given 99999999"),
        (["step-1/a.pt", "step-1/b.pt"], "step-1 holds several files of weights (a.pt, b.pt)"),
        (
            ["step-1/model-00001-of-00002.safetensors", "step-1/model-00002-of-00002.safetensors"],
            "step-1 holds its weights in parts",
        ),
        (["seed0/step-1.pt", "step-2.pt"], "has folders of seeds (seed0) and checkpoints beside"),
        (["seed0/step-1.pt", "seed-0/step-1.pt"], "are of one seed"),
    ],
)
def test_what_cannot_be_told_is_said(tmp_path: Path, names: list[str], message: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(InputError, match=re.escape(message)):
        find(tmp_path)


def test_a_pattern_finds_the_step_and_leaves_others_out(tmp_path: Path) -> None:
    touch(tmp_path, "epoch-3.pt", "epoch-10.pt", "best.pt")
    for pattern in (r"epoch-(\d+)", r"(epoch)-(?P<step>\d+)"):
        found = find(tmp_path, pattern=pattern)
        assert found.steps == (3, 10)
        assert [path.name for path in found.left_out] == ["best.pt"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"epoch-(\d+", "is no regular expression"),
        (r"epoch-\d+", "has 0 groups; give one, around the step"),
        (r"(e)poch-(\d+)", "has 2 groups"),
        (r"(nothing)", r"no name in .* matches '\(nothing\)'; there are epoch-3.pt"),
        (r"(epoch)", "the step in epoch-3.pt is 'epoch', not an integer"),
    ],
)
def test_a_pattern_that_is_wrong_is_said(tmp_path: Path, pattern: str, message: str) -> None:
    touch(tmp_path, "epoch-3.pt")
    with pytest.raises(InputError, match=message):
        find(tmp_path, pattern=pattern)


def test_a_field_gives_the_step(tmp_path: Path) -> None:
    touch(tmp_path, "a.pt", "b.pt")
    fields = {"a.pt": 7, "b.pt": 3}
    assert find(tmp_path, field=lambda path: fields[path.name]).files[0] == [
        tmp_path / "b.pt",
        tmp_path / "a.pt",
    ]
    for wrong in (1.5, True, "7", None):
        with pytest.raises(InputError, match="not an integer"):
            find(tmp_path, field=lambda path, wrong=wrong: wrong)


def test_seeds_are_folders(tmp_path: Path) -> None:
    touch(tmp_path, "seed0/step-1.pt", "seed_10/step-1.pt", "seed-2/step-1.pt", "plots/x.png")
    assert list(find(tmp_path).files) == [0, 2, 10]
    given = {4: tmp_path / "seed0", 1: str(tmp_path / "seed_10")}
    assert list(find(given).files) == [4, 1]


def test_seeds_have_the_same_steps(tmp_path: Path) -> None:
    touch(tmp_path, "seed0/step-1.pt", "seed0/step-2.pt", "seed1/step-2.pt", "seed1/step-3.pt")
    with pytest.raises(InputError, match="seed 0 has no step 3; seed 1 has no step 1"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", "nowhere is not there"),
        ("file.pt", "file.pt is a file; give a folder"),
        ({}, "no folders of checkpoints"),
        ({-1: "nowhere"}, "seeds are integers from 0"),
        ({True: "nowhere"}, "seeds are integers from 0"),
        (7, "a path is text or a Path"),
        ("", "a path cannot be empty"),
        ("a" * 300, "a{300} cannot be read: File name too long"),
    ],
)
def test_what_is_no_folder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: object, message: str
) -> None:
    monkeypatch.chdir(touch(tmp_path, "file.pt"))
    with pytest.raises(InputError, match=message):
        find(given)


def test_two_seeds_are_not_one_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(touch(tmp_path / "one", "step-1.pt"))
    with pytest.raises(
        InputError, match=r"seeds 0 and 3 are both from .*link; a seed has a folder"
    ):
        find({0: tmp_path / "one", 3: tmp_path / "link"})


def test_a_link_to_nothing_is_said_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "step-7.pt").symlink_to("gone")
    (path,) = find(tmp_path).files[0]
    with pytest.raises(InputError, match=r"step-7\.pt cannot be read: No such file"):
        read_state(path)
