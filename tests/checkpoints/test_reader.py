import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
import xarray as xr

from mechicl.checkpoints import (
    TrajectoryWriter,
    layout,
    load,
    read_config,
    read_trajectory,
    reader,
    require_run,
)
from mechicl.checkpoints.layout import CONFIG, TRAJECTORY
from mechicl.errors import DamagedRunError, InputError, MechiclError, NothingToAnalyseError
from tests.checkpoints.common import (
    assert_prefix,
    chunk,
    flip_bit,
    make_checkpoint,
    make_plan,
    read,
    write,
)


@pytest.fixture
def run(tmp_path) -> Path:
    write(tmp_path / "run", make_plan(), 5)
    return tmp_path / "run"


def test_only_the_whole_prefix_is_read(run):
    dataset = read_trajectory(run)
    assert_prefix(dataset, make_plan(), 5)
    assert "n_saved" not in dataset.variables
    assert dataset.attrs["n_planned"] == 21
    assert dataset.attrs["complete"] == 0
    assert dataset["sigma"] == 0.25
    assert dataset["diverged_at"].attrs["units"] == "step"
    assert dataset.sizes == {"seed": 2, "step": 5, "log_step": 20, "head": 2, "d_model": 3}


def test_a_finished_run_is_complete(tmp_path):
    write(tmp_path / "run", make_plan(), 21)
    dataset = read(tmp_path / "run")
    assert_prefix(dataset, make_plan(), 21)
    assert dataset.attrs["complete"] == 1


def test_parameters_are_read_when_they_are_used(run):
    dataset = read_trajectory(run)
    flip_bit(chunk(run, "W_Q"))
    assert dataset["b_Q"].shape == (2, 5)
    np.testing.assert_array_equal(dataset["b_Q"].isel(step=2), [2.0, np.float32(2 + 1 / 7)])
    with pytest.raises(ValueError, match="checksum"):
        dataset["W_Q"].load()


def test_a_divergence_at_the_last_checkpoint_lies_ahead_of_it(monkeypatch):
    monkeypatch.setattr(reader, "read_array", lambda *_: np.array([9.0, 10.0, 11.0, np.nan]))
    found = reader.read_diverged(Path("run"), None, 10)
    np.testing.assert_array_equal(found, [9, np.nan, np.nan, np.nan])


def test_config_is_read(run):
    assert read_config(run) == {"recipe": "x"}


@pytest.mark.parametrize(
    "name", ["a b", "ünï-σ", "a#b", "a%20b", "a::b", "a?b&c", "simplecache::x"]
)
def test_any_name_of_a_directory_will_do(tmp_path, name):
    write(tmp_path / name, make_plan(), 4)
    assert_prefix(read(tmp_path / name), make_plan(), 4)
    assert_prefix(read(str(tmp_path / name)), make_plan(), 4)


def test_links_relative_paths_and_trailing_slashes(run, monkeypatch):
    (run.parent / "link").symlink_to(run)
    monkeypatch.chdir(run.parent)
    for path in ("link", "run/", Path("run"), "./link/."):
        assert read(path).attrs["n_saved"] == 5


def test_reading_leaves_no_trace_in_a_directory_that_cannot_be_written(run):
    def everything():
        return {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}

    directories = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o555)
    before = everything()
    try:
        read_config(run)
        assert_prefix(read(run), make_plan(), 5)
        assert everything() == before
    finally:
        for path in directories:
            path.chmod(0o755)


def test_urls_that_are_no_run():
    with pytest.raises(InputError, match="no run at memory://nowhere"):
        read_trajectory("memory://nowhere")
    with pytest.raises(InputError, match="cannot be read"):
        read_trajectory("nosuchprotocol://x")
    with pytest.raises(InputError, match="inside a run"):
        read_trajectory("memory://x/trajectory.zarr/")


def test_a_run_in_memory(run):
    memory = fsspec.filesystem("memory")
    memory.put(str(run), "/a-run", recursive=True)
    try:
        for url in ("memory://a-run", "memory://a-run/"):
            assert_prefix(read_trajectory(url).load(), make_plan(), 5)
            assert read_config(url) == {"recipe": "x"}
        with pytest.raises(InputError, match="can be read but not continued"):
            TrajectoryWriter.resume("memory://a-run")
        with pytest.raises(InputError, match="not local"):
            TrajectoryWriter.create("memory://b-run", make_plan(), {})
        memory.rm("/a-run/config.yaml")
        with pytest.raises(DamagedRunError, match=r"config\.yaml is missing"):
            read_config("memory://a-run")
    finally:
        memory.rm("/a-run", recursive=True)


def test_what_is_no_run_is_answered_with_what_to_do(run, monkeypatch):
    here = run.parent

    def refused(path, error, *texts):
        with pytest.raises(error) as caught:
            require_run(path)
        assert type(caught.value) is error
        for text in texts:
            assert text in str(caught.value)

    refused(here / "nowhere", InputError, "there is no", "nowhere")
    refused("x" * 300, InputError, "cannot be read", "name too long")
    (here / "dangling").symlink_to(here / "gone")
    refused(here / "dangling", InputError, "is a link to", "gone")
    (here / "round").symlink_to(here / "round")
    refused(here / "round", InputError, "round")
    refused(run / CONFIG, InputError, "is a file", f"give the directory of a run: {run}")
    (here / "empty").mkdir()
    refused(here / "empty", NothingToAnalyseError, "is empty")
    refused(here, InputError, "folder of runs", str(run))
    for index in range(5):
        write(here / "many" / f"r{index}", make_plan(), 1)
    refused(here / "many", InputError, "r0, ", "r2 and 2 more")
    refused(run / TRAJECTORY, InputError, f"give the run itself: {run}")
    refused(run / TRAJECTORY / "W_Q" / "c", InputError, f"give the run itself: {run}")
    monkeypatch.chdir(run / TRAJECTORY)
    refused(".", InputError, f"give the run itself: {run}")
    (here / "other").mkdir()
    (here / "other" / "notes.txt").touch()
    refused(here / "other", InputError, "not a run", CONFIG, TRAJECTORY)
    (here / "early").mkdir()
    (here / "early" / CONFIG).write_text("a: 1")
    refused(here / "early", NothingToAnalyseError, "has not begun", "--overwrite")
    (here / "early" / TRAJECTORY).touch()
    refused(here / "early", DamagedRunError, "is not a directory")
    (run / CONFIG).unlink()
    refused(run, DamagedRunError, f"{run / CONFIG} is missing")


def test_a_run_without_a_checkpoint_has_nothing_to_analyse(tmp_path):
    write(tmp_path / "run", make_plan(), 0)
    with pytest.raises(NothingToAnalyseError, match="no checkpoint yet"):
        read_trajectory(tmp_path / "run")


def test_a_newer_schema_is_refused_with_the_version_needed(run):
    path = run / TRAJECTORY / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"] |= {"schema_version": 2, "mechicl_version": "7.8"}
    metadata["zarr_format"] = 9  # whatever else a later version does
    path.write_text(json.dumps(metadata))
    with pytest.raises(InputError, match=r"install mechicl 7\.8 or later"):
        read_trajectory(run)
    with pytest.raises(InputError, match=r"install mechicl 7\.8 or later"):
        TrajectoryWriter.resume(run)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"attributes": {}}',
        b'{"attributes": {"schema_version": Infinity, "mechicl_version": "1"}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_damaged_metadata_are_named(run, content):
    path = run / TRAJECTORY / "zarr.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DamagedRunError) as caught:
        read_trajectory(run)
    assert str(path) in str(caught.value)


def test_metadata_that_lost_an_array_are_named(run):
    path = run / TRAJECTORY / "zarr.json"
    metadata = json.loads(path.read_text())
    del metadata["consolidated_metadata"]["metadata"]["loss"]
    path.write_text(json.dumps(metadata))
    with pytest.raises(DamagedRunError, match=r"zarr\.json knows no loss"):
        read_trajectory(run)
    metadata["node_type"] = "array"
    path.write_text(json.dumps(metadata))
    with pytest.raises(DamagedRunError, match=r"zarr\.json"):
        read_trajectory(run)


@pytest.mark.parametrize(("array", "key"), [("W_Q", "shape"), ("loss", "dimension_names")])
def test_metadata_that_do_not_go_together_are_named(run, array, key):
    path = run / TRAJECTORY / "zarr.json"
    metadata = json.loads(path.read_text())
    of_one = metadata["consolidated_metadata"]["metadata"][array]
    of_one[key] = {"shape": [2, 20, 2, 3], "dimension_names": ["seed", "step"]}[key]
    path.write_text(json.dumps(metadata))
    with pytest.raises(DamagedRunError, match=rf"{TRAJECTORY} do not go together.*verify"):
        read_trajectory(run)


@pytest.mark.parametrize(
    "content", [None, b"", b"recipe: [", b"just text", b"[" * 5000, b"\xff\xfe\x00"]
)
def test_a_damaged_config_is_named(run, content):
    path = run / CONFIG
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DamagedRunError) as caught:
        read_config(run)
    assert str(path) in str(caught.value)


ARRAYS = ["W_Q", "b_Q", "loss", "diverged_at", "sigma", "n_saved", "seed", "step", "log_step"]


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("damage", ["flip", "flip the checksum", "truncate", "empty", "lose"])
def test_a_damaged_chunk_is_named_wherever_it_is(run, name, damage):
    path = chunk(run, name)
    if damage.startswith("flip"):
        flip_bit(path, 3 if damage == "flip" else -1)
    elif damage == "lose":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-8])
    with pytest.raises(DamagedRunError) as caught:
        load(read_trajectory(run), where=run)
    assert str(run / TRAJECTORY / name) in str(caught.value)


@pytest.fixture
def chunked(tmp_path, monkeypatch) -> Path:
    """Ten checkpoints, steps 0 to 45, in chunks of four; the loss in chunks of 25."""
    monkeypatch.setattr(layout, "MAX_CHUNK_STEPS", 4)
    monkeypatch.setattr(layout, "MAX_CHUNK_LOG_STEPS", 30)
    write(tmp_path / "run", make_plan(seeds=(3, 7)), 10)
    return tmp_path / "run"


def lose(run: Path, key: str, damage: str) -> None:
    path = run / TRAJECTORY / key
    path.unlink() if damage == "missing" else flip_bit(path, 7)


@pytest.mark.parametrize("damage", ["missing", "checksum"])
def test_damage_is_named_by_file_seeds_and_steps(chunked, damage):
    lose(chunked, "W_Q/c/0/1/0/0", damage)
    for dataset, place in (
        (read_trajectory(chunked), r"W_Q, seeds 3, 7, steps 20, 25, 30, 35"),
        (read_trajectory(chunked).isel(seed=[1], step=[2, 5, 7]), r"W_Q, seed 7, steps 25, 35"),
    ):
        with pytest.raises(DamagedRunError) as caught:
            load(dataset, where=chunked)
        text = str(caught.value)
        assert text.startswith(f"{chunked / TRAJECTORY / 'W_Q/c/0/1/0/0'} is ")
        assert damage in text
        assert f"({place})" in text
        assert "mechicl verify" in text
        assert "--skip-damaged" in text
    # What is not asked for cannot be in the way.
    assert load(read_trajectory(chunked).isel(step=[3, 8]), where=chunked)["W_Q"].notnull().all()
    lose(chunked, "loss/c/0/0", damage)
    with pytest.raises(DamagedRunError, match=r"\(loss, seeds 3, 7, steps 0 to 24 \(25\)\)"):
        load(read_trajectory(chunked)[["loss"]], where=str(chunked))


def test_a_missing_chunk_is_an_error_also_where_nothing_names_it(chunked):
    lose(chunked, "W_Q/c/0/1/0/0", "missing")
    dataset = read_trajectory(chunked)
    assert dataset["W_Q"][:, :4].notnull().all()
    with pytest.raises(DamagedRunError, match=r"W_Q/c/0/1/0/0 is missing"):
        dataset["W_Q"].load()


def test_a_run_that_was_replaced_since_it_was_opened_is_not_read(run):
    """Its chunks have the shapes that are asked for, and are other numbers."""
    opened = read_trajectory(run)
    write(run, make_plan(seeds=(7, 8)), 5, overwrite=True)
    for read_it in (opened["W_Q"].copy().load, lambda: load(opened.copy(), where=run)):
        with pytest.raises(MechiclError, match="was replaced since it was opened; open it again"):
            read_it()
    assert_prefix(read(run), make_plan(seeds=(7, 8)), 5)


def test_a_run_is_not_resumed_over_a_chunk_that_is_missing(chunked):
    lose(chunked, "b_Q/c/0/2", "missing")
    with pytest.raises(DamagedRunError, match=r"b_Q/c/0/2 is missing"):
        TrajectoryWriter.resume(chunked)


@pytest.mark.parametrize("damage", ["missing", "checksum"])
def test_what_is_damaged_is_left_out_on_request(chunked, damage):
    whole = load(read_trajectory(chunked), where=chunked)
    for key in ("W_Q/c/0/1/0/0", "b_Q/c/0/2", "loss/c/0/0"):
        lose(chunked, key, damage)
    expected = whole.copy(deep=True)
    expected["W_Q"].values[:, 4:8] = np.nan
    expected["b_Q"].values[:, 8:] = np.nan
    expected["loss"].values[:, :25] = np.nan
    said: list[str] = []
    for chosen in (
        {},
        {"seed": [1, 0], "step": [1, 4, 6, 9]},
        {"step": slice(5, 6), "log_step": slice(20, 30)},
    ):
        dataset = read_trajectory(chunked).isel(chosen)
        got = load(dataset, where=chunked, skip_damaged=True, notify=said.append)
        assert got is dataset
        assert got.identical(expected.isel(chosen))
        assert got["W_Q"].dtype == got["loss"].dtype == np.float32
    assert len(said) == 3 + 3 + 2
    assert said[0].startswith(f"left out as NaN: {TRAJECTORY}/")
    assert sum("(W_Q, seeds 3, 7, steps 20, 25, 30, 35)" in text for text in said) == 1
    assert sum("(W_Q, seeds 7, 3, steps 20, 30)" in text for text in said) == 1
    with pytest.warns(UserWarning, match=r"left out as NaN: .*\(b_Q, seeds 3, 7, steps 40, 45\)"):
        load(read_trajectory(chunked)[["b_Q"]], where=chunked, skip_damaged=True)
    with pytest.raises(DamagedRunError):
        load(read_trajectory(chunked), where=chunked)


def test_what_could_not_be_read_for_a_moment_is_read_chunk_by_chunk(chunked, monkeypatch):
    whole, read, failed = load(read_trajectory(chunked), where=chunked), xr.Variable.load, []

    def once(variable, **options):
        if variable.ndim == 4 and not failed:
            failed.append(variable)
            raise OSError("stale file handle")
        return read(variable, **options)

    dataset = read_trajectory(chunked).isel(seed=[1])
    monkeypatch.setattr(xr.Variable, "load", once)
    got = load(dataset, where=chunked)
    assert failed
    assert got["W_Q"].variable._in_memory
    assert got.identical(whole.isel(seed=[1]))


def test_constants_cannot_be_left_out(chunked):
    lose(chunked, "sigma/c", "missing")
    with pytest.raises(DamagedRunError, match=r"sigma/c is missing \(sigma\)"):
        load(read_trajectory(chunked), where=chunked, skip_damaged=True)


def test_nothing_is_said_of_a_whole_run(chunked):
    load(read_trajectory(chunked), where=chunked, skip_damaged=True, notify=pytest.fail)


def test_an_undamaged_run_loads(run):
    assert_prefix(load(read_trajectory(run), where=run), make_plan(), 5)


def test_a_reader_beside_a_writer_sees_whole_prefixes_alone(tmp_path):
    n_steps = 40
    plan, run = make_plan(range(n_steps)), tmp_path / "run"
    seen, errors, done = set(), [], threading.Event()

    def look():
        try:
            dataset = load(read_trajectory(run), where=run)
            assert_prefix(dataset, plan, dataset.attrs["n_saved"])
            seen.add(dataset.attrs["n_saved"])
        except NothingToAnalyseError:
            pass

    def loop():
        try:
            while not done.is_set():
                look()
        except BaseException as error:  # handed to the main thread
            errors.append(error)

    beside = threading.Thread(target=loop, daemon=True)
    try:
        with TrajectoryWriter.create(run, plan, {}, commit_seconds=0) as writer:
            beside.start()
            for index in range(n_steps):
                writer.add(make_checkpoint(plan, index))
                deadline = time.monotonic() + 10
                while index % 8 == 7 and max(seen, default=0) <= index - 7 and not errors:
                    assert time.monotonic() < deadline, "the reader reads nothing"
                    time.sleep(0.001)
    finally:
        done.set()
        beside.join(timeout=60)
    look()
    assert errors == []
    assert len(seen) >= 5
    assert max(seen) == n_steps


def test_a_reader_beside_a_writing_process(tmp_path):
    run, plan = tmp_path / "run", make_plan(range(4001))
    command = [sys.executable, "-m", "tests.checkpoints.common", str(run), "4000"]
    seen, deadline = set(), time.monotonic() + 60
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            while len(seen) < 5:
                assert process.poll() is None, "it ended before it could be read five times"
                assert time.monotonic() < deadline
                try:
                    dataset = load(read_trajectory(run), where=run)
                except NothingToAnalyseError:
                    continue
                assert_prefix(dataset, plan, dataset.attrs["n_saved"])
                seen.add(dataset.attrs["n_saved"])
        finally:
            process.kill()
    assert max(seen) < 4001


def test_reading_takes_no_lock(run):
    with TrajectoryWriter.resume(run):
        assert read(run).attrs["n_saved"] == 5
