"""Each kind of damage, injected into a small store: what is found, in which array and where."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
import zarr

from mechicl.checkpoints import (
    Checkpoint,
    Finding,
    TrajectoryWriter,
    layout,
    load,
    read_config,
    read_trajectory,
    verify,
)
from mechicl.checkpoints.layout import CONFIG, LOCK_HOLDER, TRAJECTORY, settings_digest
from mechicl.errors import DamagedRunError, InputError, NothingToAnalyseError
from tests.checkpoints.common import flip_bit, make_checkpoint, make_plan
from tests.users import nobody

SEEDS = (3, 7)
RECIPE = {
    "name": "x",
    "seeds": list(SEEDS),
    "n_steps": 100,
    "checkpoints": {"every": 5, "per_decade": 0, "at": []},
}
N_SAVED = 10  # steps 0 to 45: chunks 0-15, 20-35, 40-45 of parameters, 0-24, 25-44 of the loss

Change = Callable[[int, Checkpoint], Checkpoint]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(layout, "MAX_CHUNK_STEPS", 4)
    monkeypatch.setattr(layout, "MAX_CHUNK_LOG_STEPS", 30)


def write(
    run: Path, stop: int = N_SAVED, start: int = 0, change: Change | None = None, **attrs
) -> Path:
    plan = make_plan(seeds=SEEDS, **({"run_digest": settings_digest(RECIPE)} | attrs))
    writer = (
        TrajectoryWriter.resume(run)
        if start
        else TrajectoryWriter.create(run, plan, {"recipe": RECIPE})
    )
    with writer:
        for index in range(start, stop):
            checkpoint = make_checkpoint(plan, index)
            writer.add(change(index, checkpoint) if change else checkpoint)
    return run


@pytest.fixture
def run(tmp_path) -> Path:
    return write(tmp_path / "run")


def only(run: Path) -> Finding:
    (finding,) = verify(run)
    return finding


def found(
    what: str,
    file: str,
    array: str | None = None,
    seeds: tuple[int, ...] = (),
    steps: tuple[int, ...] = (),
    severity: str = "damage",
) -> tuple:
    return (what, severity, file, array, seeds, steps)


def seen(run: Path) -> list[tuple]:
    return [(f.what, f.severity, f.file, f.array, f.seeds, f.steps) for f in verify(run)]


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def metadata(run: Path, array: str = "") -> Path:
    return run / TRAJECTORY / array / "zarr.json"


def put(run: Path, array: str, values: object) -> None:
    """Overwrite values of an array with a right checksum."""
    group = zarr.open_group(run / TRAJECTORY, mode="r+")
    group[array].with_config({"write_empty_chunks": True})[...] = values


# A healthy run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 2, 4, 9, 10, 21])
def test_a_healthy_run_gives_no_finding(tmp_path, stop):
    assert verify(write(tmp_path / "run", stop)) == []


def test_a_run_that_was_stopped_and_resumed_is_healthy(tmp_path):
    run = write(tmp_path / "run", 3)
    for start, stop in ((3, 4), (4, 11), (11, 21)):
        assert verify(write(run, stop, start)) == []


def test_verifying_writes_nothing_and_takes_no_lock(run):
    def everything():
        return {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}

    before = everything()
    assert verify(str(run)) == []
    assert everything() == before
    with TrajectoryWriter.resume(run):
        assert verify(run) == []


# Chunks -----------------------------------------------------------------------------------------

CHUNKS = {
    "W_Q": ("c/0/1/0/0", SEEDS, (20, 25, 30, 35)),
    "b_Q": ("c/0/2", SEEDS, (40, 45)),
    "loss": ("c/0/1", SEEDS, tuple(range(25, 45))),
    "diverged_at": ("c/0", SEEDS, ()),
    "sigma": ("c", (), ()),
    "n_saved": ("c", (), ()),
    "seed": ("c/0", (), ()),
    "step": ("c/0", (), ()),
    "log_step": ("c/0", (), ()),
}
FAULTS = {
    "flip": ("altered", "is not what was written: its checksum is wrong"),
    "flip the checksum": ("altered", "is not what was written: its checksum is wrong"),
    "truncate": ("truncated", "is cut short: "),
    "grow": ("altered", "is too long: "),
    "empty": ("empty", "is empty"),
    "lose": ("missing", "is missing"),
    "a folder instead": ("missing", "is missing"),
}


@pytest.mark.parametrize("damage", FAULTS)
@pytest.mark.parametrize("array", CHUNKS)
def test_a_damaged_chunk(run, array, damage):
    key, seeds, steps = CHUNKS[array]
    path = run / TRAJECTORY / array / key
    data = path.read_bytes()
    if damage.startswith("flip"):
        flip_bit(path, 3 if damage == "flip" else -1)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "grow":
        path.write_bytes(data + b"0")
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if damage == "a folder instead":
            path.mkdir()
    what, message = FAULTS[damage]
    assert seen(run) == [found(what, f"{TRAJECTORY}/{array}/{key}", array, seeds, steps)]
    assert only(run).message.startswith(message)
    if damage == "truncate":
        assert only(run).message.endswith(f"{len(data) - 1:,} of {len(data):,} bytes")


def test_chunks_beyond_the_prefix_are_not_looked_at(run):
    later = run / TRAJECTORY / "b_Q" / "c" / "0" / "3"
    later.write_bytes(b"of a commit that was cut short")
    assert verify(run) == []
    put(run, "n_saved", 13)
    assert found("truncated", later.relative_to(run).as_posix(), "b_Q", SEEDS, (60,)) in seen(run)


def test_every_damaged_chunk_is_named(run):
    for row in (0, 2):
        flip_bit(run / TRAJECTORY / "W_Q" / "c" / "0" / str(row) / "0" / "0")
    (run / TRAJECTORY / "b_Q" / "c" / "0" / "1").unlink()
    assert seen(run) == [
        found("altered", f"{TRAJECTORY}/W_Q/c/0/0/0/0", "W_Q", SEEDS, (0, 5, 10, 15)),
        found("altered", f"{TRAJECTORY}/W_Q/c/0/2/0/0", "W_Q", SEEDS, (40, 45)),
        found("missing", f"{TRAJECTORY}/b_Q/c/0/1", "b_Q", SEEDS, (20, 25, 30, 35)),
    ]


def test_chunks_that_split_seeds_or_matrices(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "MAX_CHUNK_BYTES", 16)  # of 48 a step: 1 x 1 x 2 x 2
    run = write(tmp_path / "run", 3)
    assert verify(run) == []
    array = zarr.open_group(run / TRAJECTORY, mode="r")["W_Q"]
    assert array.chunks == (1, 1, 2, 2)
    flip_bit(run / TRAJECTORY / "W_Q" / "c" / "1" / "2" / "0" / "1")
    assert seen(run) == [found("altered", f"{TRAJECTORY}/W_Q/c/1/2/0/1", "W_Q", (7,), (10,))]


def test_a_chunk_that_was_being_replaced_is_read_again(run, monkeypatch):
    inspection = sys.modules["mechicl.checkpoints.inspection"]
    read, failed = inspection.read_chunk, []

    def once(run, array, chunk):
        if chunk.file.endswith("W_Q/c/0/1/0/0") and not failed:
            failed.append(chunk)
            raise inspection.ChunkError("missing", "is missing")
        return read(run, array, chunk)

    monkeypatch.setattr(inspection, "read_chunk", once)
    assert verify(run) == []
    assert failed


def test_without_n_saved_the_resume_files_say_how_many_checkpoints_are_whole(run):
    (run / TRAJECTORY / "n_saved" / "c").unlink()
    flip_bit(run / TRAJECTORY / "b_Q" / "c" / "0" / "2")
    shutil.copy(run / "resume-45.safetensors", run / "resume-50.safetensors")
    assert seen(run) == [
        found("missing", f"{TRAJECTORY}/n_saved/c", "n_saved"),
        found("altered", f"{TRAJECTORY}/b_Q/c/0/2", "b_Q", SEEDS, (40, 45)),
        found("leftover", "resume-50.safetensors", severity="remark"),
    ]
    for path in run.glob("resume-*"):
        path.unlink()
    assert seen(run) == [
        found("missing", f"{TRAJECTORY}/n_saved/c", "n_saved"),
        found("unreadable", TRAJECTORY),
    ]
    assert "how many checkpoints are whole is lost" in verify(run)[1].message


def test_labels_that_are_lost_are_those_of_the_recipe(run):
    for name in ("seed", "step"):
        flip_bit(run / TRAJECTORY / name / "c" / "0")
    flip_bit(run / TRAJECTORY / "b_Q" / "c" / "0" / "1")
    labels = [
        found("altered", f"{TRAJECTORY}/seed/c/0", "seed"),
        found("altered", f"{TRAJECTORY}/step/c/0", "step"),
    ]
    lost = found("altered", f"{TRAJECTORY}/b_Q/c/0/1", "b_Q", SEEDS, (20, 25, 30, 35))
    assert seen(run) == [*labels, lost]
    (run / CONFIG).unlink()
    assert seen(run) == [found("missing", CONFIG), *labels, found("unreadable", TRAJECTORY)]
    assert "which steps were saved is lost" in verify(run)[-1].message


# Metadata ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "missing"),
        (b"", "empty"),
        (b"{", "altered"),
        (b"[]", "altered"),
        (b"{}", "altered"),
        (b"[" * 100_000, "altered"),
        (b"\xff\xfe", "altered"),
    ],
)
@pytest.mark.parametrize("array", ["", "W_Q", "sigma", "step"])
def test_broken_metadata(run, array, content, what):
    path = metadata(run, array)
    path.unlink() if content is None else path.write_bytes(content)
    file = path.relative_to(run).as_posix()
    if array and content == b"{}":
        what = "disagrees"  # it is JSON, but not what the consolidated metadata say
    # Everything else is still looked at.
    flip_bit(run / TRAJECTORY / "b_Q" / "c" / "0" / "2")
    assert seen(run) == [
        found(what, file, array or None),
        found("altered", f"{TRAJECTORY}/b_Q/c/0/2", "b_Q", SEEDS, (40, 45)),
    ]


def test_an_array_that_is_gone(run):
    shutil.rmtree(run / TRAJECTORY / "b_Q")
    assert seen(run) == [
        found("missing", f"{TRAJECTORY}/b_Q/zarr.json", "b_Q"),
        found("missing", f"{TRAJECTORY}/b_Q/c/0/0", "b_Q", SEEDS, (0, 5, 10, 15)),
        found("missing", f"{TRAJECTORY}/b_Q/c/0/1", "b_Q", SEEDS, (20, 25, 30, 35)),
        found("missing", f"{TRAJECTORY}/b_Q/c/0/2", "b_Q", SEEDS, (40, 45)),
    ]


def test_consolidated_metadata_that_disagree(run):
    def shape(content):
        content["shape"] = [2, 20]

    edit(metadata(run, "b_Q"), shape)
    assert seen(run) == [found("disagrees", f"{TRAJECTORY}/b_Q/zarr.json", "b_Q")]
    assert only(run).message == (
        "differs in shape from the consolidated metadata in trajectory.zarr/zarr.json"
    )


def test_consolidated_metadata_that_lack_an_array(run):
    def lose(name):
        return lambda root: root["consolidated_metadata"]["metadata"].pop(name)

    edit(metadata(run), lose("b_Q"))
    assert seen(run) == [found("disagrees", f"{TRAJECTORY}/b_Q/zarr.json", "b_Q")]
    assert "is not in the consolidated metadata" in only(run).message
    edit(metadata(run), lose("loss"))
    assert seen(run)[0] == found("altered", f"{TRAJECTORY}/zarr.json")
    assert verify(run)[0].message == "knows no loss"


def test_without_consolidated_metadata_the_run_is_whole_but_remarked(run):
    edit(metadata(run), lambda root: root.pop("consolidated_metadata"))
    assert seen(run) == [found("missing", f"{TRAJECTORY}/zarr.json", severity="remark")]


def test_an_array_whose_metadata_are_lost_twice(run):
    shutil.rmtree(run / TRAJECTORY / "loss")
    edit(metadata(run), lambda root: root["consolidated_metadata"]["metadata"].pop("loss"))
    assert seen(run) == [
        found("altered", f"{TRAJECTORY}/zarr.json"),
        found("missing", f"{TRAJECTORY}/loss/zarr.json", "loss"),
    ]


# Configuration and shapes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "what", "message"),
    [
        (None, "missing", "is missing"),
        (b"", "empty", "holds no settings"),
        (b"recipe: [", "altered", "is not YAML"),
        (b"just text", "altered", "holds no settings"),
        (b"\xff\xfe\x00", "altered", "is not YAML"),
        (b"a: 1", "altered", "has no recipe"),
        (b"recipe: x", "altered", "has no recipe"),
        (b"recipe: {since: 2020-01-01}", "disagrees", "is not the one that the run was trained"),
    ],
)
def test_a_damaged_config(run, content, what, message):
    path = run / CONFIG
    path.unlink() if content is None else path.write_bytes(content)
    assert seen(run) == [found(what, CONFIG)]
    assert only(run).message.startswith(message)


def configure(run: Path, **settings: object) -> None:
    (run / CONFIG).write_text(yaml.safe_dump({"recipe": RECIPE | settings}))


def test_a_config_of_another_digest(run):
    configure(run, name="y", description="decides nothing")
    assert verify(run) == []
    configure(run, batch_size=3)
    assert seen(run) == [found("disagrees", CONFIG)]
    assert settings_digest(RECIPE | {"batch_size": 3}) in only(run).message
    assert settings_digest(RECIPE) in only(run).message


@pytest.mark.parametrize(
    ("settings", "array", "message"),
    [
        ({"seeds": [3, 8]}, "seed", "has the seeds [3, 8], and the trajectory [3, 7]"),
        ({"seeds": [3]}, "seed", "has the seeds [3], and"),
        ({"n_steps": 105}, "step", "schedules 22 up to 105, and the trajectory has 21 up to 100"),
        ({"checkpoints": {"every": 20}}, "step", "and the trajectory has 21 up to 100"),
    ],
)
def test_a_config_that_disagrees_with_the_arrays(tmp_path, settings, array, message):
    digest = settings_digest(RECIPE | settings)
    run = write(tmp_path / "run", run_digest=digest)
    configure(run, **settings)
    assert seen(run) == [found("disagrees", CONFIG, array)]
    assert message in only(run).message


@pytest.mark.parametrize("n_saved", [-1, 22])
def test_n_saved_beyond_what_is_planned(run, n_saved):
    put(run, "n_saved", n_saved)
    assert seen(run) == [found("disagrees", f"{TRAJECTORY}/n_saved/c", "n_saved")]
    assert only(run).message == f"is {n_saved}, of 21 checkpoints planned"
    (run / "resume-45.safetensors").unlink()
    assert seen(run)[1:] == [found("unreadable", TRAJECTORY)]


def test_n_saved_beyond_what_is_written(run):
    put(run, "n_saved", 12)
    later, w, b = (50, 55), f"{TRAJECTORY}/W_Q/c/0/2/0/0", f"{TRAJECTORY}/b_Q/c/0/2"
    assert seen(run) == [
        found("not_finite", w, "W_Q", SEEDS, later),
        found("not_finite", b, "b_Q", SEEDS, later),
        found("not_finite", f"{TRAJECTORY}/loss/c/0/1", "loss", SEEDS, (45, 46, 47, 48, 49)),
        found("missing", f"{TRAJECTORY}/loss/c/0/2", "loss", SEEDS, (50, 51, 52, 53, 54)),
        found("missing", "resume-55.safetensors"),
        found("leftover", "resume-45.safetensors", severity="remark"),
    ]


def test_coordinates_that_cannot_be(run):
    steps = np.arange(0, 101, 5)
    steps[[4, 7]] = steps[[3, 6]]
    put(run, "step", steps)
    put(run, "seed", 3)
    put(run, "log_step", np.arange(100)[::-1])
    assert seen(run) == [
        found("disagrees", CONFIG, "seed"),
        found("disagrees", f"{TRAJECTORY}/seed/c/0", "seed"),
        found("disagrees", CONFIG, "step"),
        found("disagrees", f"{TRAJECTORY}/step/c/0", "step", steps=(15, 30)),
        found("disagrees", f"{TRAJECTORY}/log_step/c/0", "log_step"),
    ]


def test_a_seed_below_0(run):
    put(run, "seed", [3, -7])
    assert seen(run) == [
        found("disagrees", CONFIG, "seed"),
        found("disagrees", f"{TRAJECTORY}/seed/c/0", "seed"),
    ]


def both(run: Path, array: str, **changes: object) -> None:
    """Change the metadata of an array where it lies and where they are consolidated."""
    edit(metadata(run, array), lambda own: own.update(changes))
    edit(
        metadata(run),
        lambda root: root["consolidated_metadata"]["metadata"][array].update(changes),
    )


@pytest.mark.parametrize(
    ("array", "changes", "message"),
    [
        ("W_Q", {"shape": [2, 20, 2, 3]}, "has 20 along step, where the others have 21"),
        ("W_Q", {"shape": [3, 21, 2, 3]}, "has 3 along seed, where the others have 2"),
        ("loss", {"shape": [2, 99]}, "has 99 along log_step, where the others have 100"),
        ("b_Q", {"dimension_names": ["step", "seed"]}, "has the dims step, seed"),
        ("b_Q", {"data_type": "float64"}, "is float64, not float32"),
        ("loss", {"dimension_names": ["step", "log_step"]}, "is float32 with 2 axes"),
        ("diverged_at", {"dimension_names": None}, "is float64 with 1 axes and the dims ()"),
        ("n_saved", {"data_type": "float64"}, "is float64 with 0 axes"),
    ],
)
def test_shapes_that_disagree(run, array, changes, message):
    both(run, array, **changes)
    first = verify(run)[0]
    assert (first.what, first.severity, first.array) == ("disagrees", "damage", array)
    assert first.file == f"{TRAJECTORY}/{array}/zarr.json"
    assert first.message.startswith(message)
    assert len(verify(run)) == 1


def test_a_head_that_one_array_has_not(tmp_path):
    run = write(tmp_path / "run")
    group = zarr.open_group(run / TRAJECTORY, mode="r+")
    dims = ("seed", "step", "head")
    group.create_array(
        "W_O", shape=(2, 21, 3), chunks=(2, 4, 3), dtype="float32", dimension_names=dims
    )
    root = json.loads(metadata(run).read_text())
    root["consolidated_metadata"]["metadata"]["W_O"] = json.loads(metadata(run, "W_O").read_text())
    metadata(run).write_text(json.dumps(root))
    # The first by name is taken at its word.
    assert [f.message for f in verify(run) if f.what == "disagrees"] == [
        "has 2 along head, where the others have 3"
    ]


# Values -----------------------------------------------------------------------------------------


def changed(checkpoint: Checkpoint, name: str, where: object, value: float) -> Checkpoint:
    parameters = {key: array.copy() for key, array in checkpoint.parameters.items()}
    parameters[name][where] = value
    return replace(checkpoint, parameters=parameters)


@pytest.mark.parametrize("seed", [0, 1, None])
def test_nan_inside_the_prefix(tmp_path, seed):
    def change(index, checkpoint):
        where = (slice(None) if seed is None else seed, 1, 2)
        return changed(checkpoint, "W_Q", where, np.nan) if index in (2, 5, 7) else checkpoint

    run = write(tmp_path / "run", change=change)
    seeds = SEEDS if seed is None else SEEDS[seed : seed + 1]
    assert seen(run) == [
        found("not_finite", f"{TRAJECTORY}/W_Q/c/0/0/0/0", "W_Q", seeds, (10,)),
        found("not_finite", f"{TRAJECTORY}/W_Q/c/0/1/0/0", "W_Q", seeds, (25, 35)),
    ]
    assert verify(run)[0].message == "has NaN in checkpoints that are committed"


def test_infinities_inside_the_prefix(run):
    values = zarr.open_group(run / TRAJECTORY, mode="r")["b_Q"][...]
    values[1, 9] = -np.inf
    put(run, "b_Q", values)
    assert seen(run) == [found("not_finite", f"{TRAJECTORY}/b_Q/c/0/2", "b_Q", (7,), (45,))]
    assert "infinities" in only(run).message


def diverging(seed: int, at: int) -> Change:
    """Return the change to a seed that diverges at a step, as training stores it."""

    def change(index, checkpoint):
        step = 5 * index
        if step <= at:
            return checkpoint
        for name in checkpoint.parameters:
            checkpoint = changed(checkpoint, name, seed, np.nan)
        diverged_at = np.full(2, np.nan)
        diverged_at[seed] = at
        loss = checkpoint.loss.copy()
        loss[seed, np.arange(step - 5, step) >= at] = np.nan
        return replace(checkpoint, diverged_at=diverged_at, loss=loss)

    return change


@pytest.mark.parametrize("at", [0, 4, 5, 19, 20, 44])
def test_a_seed_that_diverged_is_healthy(tmp_path, at):
    assert verify(write(tmp_path / "run", change=diverging(1, at))) == []
    assert verify(write(tmp_path / "other", 21, change=diverging(0, at))) == []


def test_nan_before_a_seed_diverged(tmp_path):
    run = write(tmp_path / "run", change=diverging(1, 22))
    put(run, "diverged_at", [np.nan, 33])
    assert seen(run) == [
        found("not_finite", f"{TRAJECTORY}/W_Q/c/0/1/0/0", "W_Q", (7,), (25, 30)),
        found("not_finite", f"{TRAJECTORY}/b_Q/c/0/1", "b_Q", (7,), (25, 30)),
        found("not_finite", f"{TRAJECTORY}/loss/c/0/0", "loss", (7,), (22, 23, 24)),
        found("not_finite", f"{TRAJECTORY}/loss/c/0/1", "loss", (7,), tuple(range(25, 33))),
    ]


def test_numbers_after_a_seed_diverged(tmp_path):
    run = write(tmp_path / "run", change=diverging(1, 33))
    put(run, "diverged_at", [np.nan, 22])
    assert seen(run) == [
        found("disagrees", f"{TRAJECTORY}/W_Q/c/0/1/0/0", "W_Q", (7,), (25, 30)),
        found("disagrees", f"{TRAJECTORY}/b_Q/c/0/1", "b_Q", (7,), (25, 30)),
    ]


def test_where_diverged_at_is_lost_nan_is_not_judged(tmp_path):
    run = write(tmp_path / "run", change=diverging(1, 22))
    (run / TRAJECTORY / "diverged_at" / "c" / "0").unlink()
    assert seen(run) == [found("missing", f"{TRAJECTORY}/diverged_at/c/0", "diverged_at", SEEDS)]


def test_a_loss_that_is_not_finite(tmp_path):
    def change(index, checkpoint):
        if index == 6:
            checkpoint.loss[0, [1, 3]] = np.inf, np.nan
        return checkpoint

    run = write(tmp_path / "run", change=change)
    assert seen(run) == [found("not_finite", f"{TRAJECTORY}/loss/c/0/1", "loss", (3,), (26, 28))]


def repeating(indices: tuple[int, ...], seed: object, names: tuple[str, ...]) -> Change:
    """Return the change that gives checkpoints the parameters of the one before, for a seed."""
    kept: dict[str, np.ndarray] = {}

    def change(index, checkpoint):
        if index in indices:
            for name in names:
                checkpoint = changed(checkpoint, name, seed, kept[name][seed])
        kept.update(checkpoint.parameters)
        return checkpoint

    return change


@pytest.mark.parametrize("seed", [0, 1, slice(None)])
def test_duplicated_checkpoints_are_a_remark(tmp_path, seed):
    run = write(tmp_path / "run", change=repeating((2, 4, 5), seed, ("W_Q", "b_Q")))
    seeds = tuple(np.array(SEEDS)[[seed] if isinstance(seed, int) else seed].tolist())
    # Step 20 begins a chunk: it is compared with the end of the one before.
    assert seen(run) == [
        found("duplicate", TRAJECTORY, None, seeds, (10, 20, 25), severity="remark")
    ]


def test_one_parameter_that_stands_still_is_no_duplicate(tmp_path):
    assert verify(write(tmp_path / "run", change=repeating((2, 4, 5), 0, ("W_Q",)))) == []


def test_a_duplicate_is_not_told_from_a_chunk_that_is_lost(tmp_path):
    run = write(tmp_path / "run", change=repeating((2, 4, 5, 8), 0, ("W_Q", "b_Q")))
    flip_bit(run / TRAJECTORY / "b_Q" / "c" / "0" / "1")
    assert seen(run) == [
        found("altered", f"{TRAJECTORY}/b_Q/c/0/1", "b_Q", SEEDS, (20, 25, 30, 35)),
        found("duplicate", TRAJECTORY, None, (3,), (10,), severity="remark"),
    ]


def test_a_checkpoint_that_is_wrong_jumps_there_and_back(tmp_path):
    def change(index, checkpoint):
        return changed(checkpoint, "b_Q", 1, 1e4) if index == 5 else checkpoint

    run = write(tmp_path / "run", change=change)
    assert seen(run) == [
        found("jump", f"{TRAJECTORY}/b_Q/c/0/1", "b_Q", (7,), (25, 30), severity="remark")
    ]
    # b goes from 5 to 10,000 where it else goes up by 1 a checkpoint.
    assert only(run).message == "changes 9,995 times as fast as in the checkpoints around"


@pytest.mark.parametrize(("first", "file", "step"), [(1, 0, 5), (8, 2, 40), (9, 2, 45)])
def test_a_jump_to_stay(tmp_path, first, file, step):
    def change(index, checkpoint):
        bias = checkpoint.parameters["b_Q"][0] + 100
        return changed(checkpoint, "b_Q", 0, bias) if index >= first else checkpoint

    run = write(tmp_path / "run", change=change)
    assert seen(run) == [
        found("jump", f"{TRAJECTORY}/b_Q/c/0/{file}", "b_Q", (3,), (step,), severity="remark")
    ]


def test_a_jump_of_a_parameter_that_chunks_split_is_in_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "MAX_CHUNK_BYTES", 16)

    def change(index, checkpoint):
        return changed(checkpoint, "W_Q", (0, 1, 2), 1e5) if index == 9 else checkpoint

    run = write(tmp_path / "run", change=change)
    assert seen(run) == [found("jump", f"{TRAJECTORY}/W_Q", "W_Q", (3,), (45,), severity="remark")]


def test_what_is_no_jump(tmp_path):
    """A change 99 times as fast, and one that slows down by a third each checkpoint from 1,000."""

    def faster(index, checkpoint):
        extra = 98 * (index >= 5)
        return changed(checkpoint, "b_Q", 0, checkpoint.parameters["b_Q"][0] + extra)

    def slowing(index, checkpoint):
        return changed(checkpoint, "b_Q", 0, 3000 * (1 - (2 / 3) ** index))

    for number, change in enumerate((faster, slowing)):
        assert verify(write(tmp_path / str(number), change=change)) == []


def test_a_jump_is_a_rate_and_steps_may_be_far_apart(tmp_path):
    """A thousand updates between checkpoints change a thousand times as much as one."""
    steps = [0, 1, 2, 3, 4, 1000, 2000, 3000]
    recipe = {"seeds": [3], "n_steps": 3000, "checkpoints": {"every": None, "per_decade": 0}}
    recipe["checkpoints"]["at"] = steps
    plan = make_plan(steps, (3,), run_digest=settings_digest(recipe))
    with TrajectoryWriter.create(tmp_path / "run", plan, {"recipe": recipe}) as writer:
        for index, step in enumerate(steps):
            checkpoint = make_checkpoint(plan, index)
            for name in checkpoint.parameters:
                checkpoint = changed(checkpoint, name, ..., 1e-3 * step)
            writer.add(checkpoint)
    assert verify(tmp_path / "run") == []


# What a killed writer leaves --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "array"),
    [
        ("config.yaml.partial", None),
        ("resume-45.safetensors.partial", None),
        ("resume-50.safetensors.partial", None),
        ("resume-50.safetensors", None),
        (f"{TRAJECTORY}/zarr.json.partial", None),
        (f"{TRAJECTORY}/W_Q/c/0/2/0/0.partial", "W_Q"),
    ],
)
def test_leftovers_of_a_killed_write_are_a_remark(run, file, array):
    (run / file).write_bytes(b"half of")
    assert seen(run) == [found("leftover", file, array, severity="remark")]


def test_leftovers_of_a_replacement(run):
    (run / ".replaced-abc").mkdir()
    shutil.copytree(run / TRAJECTORY, run / (TRAJECTORY + ".partial"))
    assert seen(run) == [
        found("leftover", ".replaced-abc", severity="remark"),
        found("leftover", f"{TRAJECTORY}.partial", severity="remark"),
    ]


def test_what_a_living_writer_has_in_hand_is_no_leftover(run):
    (run / "resume-50.safetensors.partial").write_bytes(b"half of")
    holders = {"pid": os.getpid(), "host": socket.gethostname()}
    finished = subprocess.Popen(["true"])
    finished.wait()
    for change, is_remarked in (
        ({}, False),
        ({"pid": finished.pid, "host": "another"}, False),
        ({"pid": finished.pid}, True),
    ):
        (run / LOCK_HOLDER).write_text(json.dumps(holders | change))
        assert bool(verify(run)) == is_remarked


@pytest.mark.parametrize(
    ("damage", "what"), [("lose", "missing"), ("empty", "empty"), ("flip", "altered")]
)
@pytest.mark.parametrize("stop", [N_SAVED, 21])
def test_the_optimiser_state_of_the_last_commit(tmp_path, stop, damage, what):
    """Without it an unfinished run cannot go on; a complete one needs it no more."""
    run = write(tmp_path / "run", stop)
    file = f"resume-{5 * (stop - 1)}.safetensors"
    if damage == "lose":
        (run / file).unlink()
    elif damage == "empty":
        (run / file).write_bytes(b"")
    else:
        flip_bit(run / file, -3)
    severity = "remark" if stop == 21 else "damage"
    assert seen(run) == [found(what, file, severity=severity)]
    assert only(run).message.startswith(
        {"lose": "is missing", "empty": "cannot be read", "flip": "has a wrong checksum"}[damage]
    )
    assert only(run).message.endswith("the run is complete") == (stop == 21)


def test_an_optimiser_state_that_a_writer_has_replaced_meanwhile(run, monkeypatch):
    verification = sys.modules["mechicl.checkpoints.verify"]
    read, written = verification.load_arrays, []

    def late(path):
        if not written:
            written.append(path.name)
            write(run, 12, N_SAVED)
        return read(path)

    monkeypatch.setattr(verification, "load_arrays", late)
    assert verify(run) == []
    assert written == ["resume-45.safetensors"]
    assert not (run / written[0]).exists()


# Beside a writer, in bounded memory -------------------------------------------------------------


def test_beside_a_writer_nothing_is_found(tmp_path):
    run, errors, seen_at = tmp_path / "run", [], set()

    def loop():
        try:
            while not done.is_set():
                findings = verify(run)
                assert findings == []
                seen_at.add(int(zarr.open_group(run / TRAJECTORY, mode="r")["n_saved"][...]))
        except BaseException as error:  # handed to the main thread
            errors.append(error)

    recipe = RECIPE | {"n_steps": 80, "checkpoints": {"every": 1, "per_decade": 0}}
    plan = make_plan(range(81), SEEDS, run_digest=settings_digest(recipe))
    done, reader = threading.Event(), threading.Thread(target=loop)
    with TrajectoryWriter.create(run, plan, {"recipe": recipe}, commit_seconds=0) as writer:
        reader.start()
        for index in range(81):
            writer.add(make_checkpoint(plan, index))
    done.set()
    reader.join()
    assert errors == []
    assert len(seen_at) > 3


def test_memory_is_bounded_by_a_few_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "MAX_CHUNK_STEPS", 256)
    monkeypatch.setattr(layout, "MAX_CHUNK_BYTES", 2**17)
    recipe = {"seeds": [0], "n_steps": 400, "checkpoints": {"every": 1, "per_decade": 0}}
    plan = make_plan(range(401), (0,), run_digest=settings_digest(recipe))
    plan = replace(plan, sizes={"head": 32, "d_model": 128})
    draw = np.random.default_rng(0)
    with TrajectoryWriter.create(tmp_path / "run", plan, {"recipe": recipe}) as writer:
        for index in range(401):
            given = make_checkpoint(plan, index)
            w = draw.standard_normal((1, 32, 128)).astype(np.float32)
            writer.add(replace(given, parameters=dict(given.parameters) | {"W_Q": w}, resume={}))
    assert verify(tmp_path / "run") == []
    tracemalloc.start()
    try:
        verify(tmp_path / "run")
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**17 < 401 * 4 * 32 * 128 / 3
    finally:
        tracemalloc.stop()


# Hostile places ---------------------------------------------------------------------------------


def test_every_flipped_bit_of_data_is_found_and_none_brings_it_down(run):
    """Bits of all files, some of each: a chunk or the optimiser state never hides one."""
    draw, undetected = np.random.default_rng(1), []
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        file, data = path.relative_to(run).as_posix(), path.read_bytes()
        for position in draw.choice(len(data), min(len(data), 3), replace=False):
            flip_bit(path, int(position))
            try:
                if not any(finding.severity == "damage" for finding in verify(run)):
                    undetected.append(file)
            except InputError as error:  # the schema's number became another
                assert "schema" in str(error)
            path.write_bytes(data)
    assert verify(run) == []
    # Descriptions have no checksum: the recipe's name, an attribute of the whole.
    assert set(undetected) <= {CONFIG, f"{TRAJECTORY}/zarr.json"}


def test_a_newer_schema_is_refused_with_the_version_needed(run):
    def age(number: int, version: str) -> None:
        edit(
            metadata(run),
            lambda root: root["attributes"].update(schema_version=number, mechicl_version=version),
        )

    age(2, "7.8")
    for read in (verify, read_trajectory, TrajectoryWriter.resume):
        with pytest.raises(InputError, match=r"install mechicl 7\.8 or later"):
            read(run)
    age(0, "0.0.3")
    for read in (verify, read_trajectory, TrajectoryWriter.resume):
        with pytest.raises(InputError, match=r"mechicl 0\.0\.3 wrote .* with schema 0.*read it"):
            read(run)


def test_a_zarr_v2_store(run):
    shutil.rmtree(run / TRAJECTORY)
    group = zarr.open_group(run / TRAJECTORY, mode="w", zarr_format=2)
    group.create_array("W_Q", shape=(2, 3), dtype="float32")
    for read in (verify, read_trajectory, TrajectoryWriter.resume):
        with pytest.raises(InputError, match=r"is a Zarr v2 store \(it has \.z"):
            read(run)


STRAY = (".DS_Store", "Thumbs.db", ".ipynb_checkpoints/zarr-checkpoint.json", "config.yaml~")


def test_stray_files_at_every_level_do_no_harm(run):
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    assert len(folders) > 15
    for folder in folders:
        for stray in (*STRAY, "zarr.json~", "resume-45.safetensors~", "0~"):
            (folder / stray).parent.mkdir(exist_ok=True)
            (folder / stray).write_bytes(b"\xff\x00")
    assert verify(run) == []
    assert load(read_trajectory(run), where=run).attrs["n_saved"] == N_SAVED
    assert read_config(run) == {"recipe": RECIPE}
    write(run, 21, N_SAVED)
    assert verify(run) == []


def test_a_linked_run_and_a_dangling_link(run):
    link = run.parent / "link"
    link.symlink_to(run)
    assert verify(link) == []
    flip_bit(run / TRAJECTORY / "sigma" / "c")
    assert only(link).file == f"{TRAJECTORY}/sigma/c"
    run.rename(run.parent / "moved")
    with pytest.raises(InputError, match="is a link to"):
        verify(link)


@pytest.mark.parametrize("name", ["a b", "ünï-σ", "a#b", "a%20b", "a::b", "a?b&c", "file::x", "ä:"])
def test_any_name_of_a_directory_will_do(tmp_path, name, monkeypatch):
    run = write(tmp_path / name)
    assert verify(run) == verify(f"{run}/") == []
    monkeypatch.chdir(tmp_path)
    assert verify(name) == verify(f"{name}/") == verify(f"./{name}/.") == []
    flip_bit(run / TRAJECTORY / "b_Q" / "c" / "0" / "2")
    assert seen(Path(name)) == [found("altered", f"{TRAJECTORY}/b_Q/c/0/2", "b_Q", SEEDS, (40, 45))]


def test_what_is_no_run_is_refused_as_everywhere(run):
    here = run.parent
    (here / "empty").mkdir()
    (here / "begun").mkdir()
    (here / "begun" / CONFIG).write_text("a: 1")
    (here / "file" / TRAJECTORY).parent.mkdir()
    (here / "file" / TRAJECTORY).touch()
    for path, error, text in (
        (here / "nowhere", InputError, "there is no"),
        (here / "empty", NothingToAnalyseError, "is empty"),
        (here / "begun", NothingToAnalyseError, "has not begun"),
        (here, InputError, "folder of runs"),
        (run / CONFIG, InputError, "is a file"),
        (run / TRAJECTORY, InputError, "inside a run"),
        (here / "file", DamagedRunError, "not a directory"),
        ("", InputError, "cannot be empty"),
        ("memory://nowhere", InputError, "no run at"),
    ):
        with pytest.raises(error, match=text) as caught:
            verify(path)
        assert type(caught.value) is error


def test_a_run_elsewhere_is_to_be_copied(run):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(run), "/a-run", recursive=True)
    try:
        with pytest.raises(InputError, match="copy it to a local directory"):
            verify("memory://a-run")
    finally:
        memory.rm("/a-run", recursive=True)


@contextmanager
def mounted(folder: Path) -> Iterator[Callable[[str], None]]:
    """Mount a tmpfs on a folder; yield what mounts it anew with other options."""

    def mount(*options: str) -> None:
        done = subprocess.run(
            ["mount", *options, str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}; lifted for root")

    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root may mount; lifted for root")
    mount("-t", "tmpfs", "none")
    try:
        yield lambda options: mount("-o", f"remount,{options}")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_mount(tmp_path):
    with mounted(tmp_path) as remount:
        run = write(tmp_path / "run")
        flip_bit(run / TRAJECTORY / "b_Q" / "c" / "0" / "2")
        remount("ro")
        with pytest.raises(OSError, match="Read-only"):
            (run / "x").touch()
        assert seen(run) == [found("altered", f"{TRAJECTORY}/b_Q/c/0/2", "b_Q", SEEDS, (40, 45))]
        dataset = read_trajectory(run)[["W_Q", "loss"]]
        assert np.isfinite(load(dataset, where=run)["W_Q"]).all()


@pytest.mark.parametrize(
    ("file", "array", "seeds", "steps"),
    [
        (f"{TRAJECTORY}/W_Q/c/0/1/0/0", "W_Q", SEEDS, (20, 25, 30, 35)),
        (f"{TRAJECTORY}/sigma/zarr.json", "sigma", (), ()),
        (f"{TRAJECTORY}/zarr.json", None, (), ()),
        (CONFIG, None, (), ()),
        ("resume-45.safetensors", None, (), ()),
    ],
)
def test_a_file_that_may_not_be_read(file, array, seeds, steps):
    # Not in tmp_path, into which no other user may look.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        run = write(Path(folder) / "run")
        load(read_trajectory(run), where=run)  # imports what nobody may not
        with nobody():
            assert verify(run) == []
        (run / file).chmod(0)
        with nobody():
            assert seen(run) == [found("unreadable", file, array, seeds, steps)]
            assert "ermission denied" in only(run).message
            if array == "W_Q":
                with pytest.raises(DamagedRunError, match=r"W_Q/c/0/1/0/0 cannot be read: Permi"):
                    load(read_trajectory(run), where=run)
