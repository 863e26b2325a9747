"""Sweeps: what they train is what was asked, once; what fails or is taken stops nothing else."""

import csv
from pathlib import Path

import numpy as np
import pytest
import yaml

import mechicl
from mechicl.checkpoints.claim import RunLock
from mechicl.errors import InputError, MechiclError
from mechicl.studies import trained
from mechicl.studies.sweep import INDEX, Entry, _names, load_sweep, sweep, sweep_index
from mechicl.training import Recipe, load_recipe

SWEEP = {
    "recipe": "he2025-two-head-quick",
    "set": {"d": 2, "n_context": 5, "batch_size": 8, "n_steps": 4, "seeds": [0, 1]},
    "grid": {"n_heads": [1, 2], "noise_variance": [0.1, 0.5]},
}
NAMES = [
    "n_heads-1_noise_variance-0.1",
    "n_heads-1_noise_variance-0.5",
    "n_heads-2_noise_variance-0.1",
    "n_heads-2_noise_variance-0.5",
]


def write(path: Path, **changes: object) -> Path:
    path.write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "heads.yaml")


def train(file: Path, out: Path) -> list[Entry]:
    return list(sweep(file, out, compile=False))


def index(out: Path) -> list[dict[str, str]]:
    with (out / INDEX).open() as text:
        return list(csv.DictReader(text))


def test_a_grid_is_every_combination(file: Path, tmp_path: Path) -> None:
    recipes = load_sweep(file).recipes()
    assert list(recipes) == NAMES
    settings = [(r.model.n_heads, r.task.noise_variance) for r in recipes.values()]
    assert settings == [(1, 0.1), (1, 0.5), (2, 0.1), (2, 0.5)]
    assert {recipe.n_steps for recipe in recipes.values()} == {4}


def test_a_list_is_taken_as_it_is_and_times_the_grid(tmp_path: Path) -> None:
    runs = [{"learning_rate": 0.1}, {"learning_rate": 0.2, "batch_size": 16}]
    own = {key: value for key, value in SWEEP["set"].items() if key != "batch_size"}
    alone = load_sweep(write(tmp_path / "a.yaml", set=own, runs=runs, grid={})).recipes()
    assert list(alone) == ["learning_rate-0.1", "learning_rate-0.2_batch_size-16"]
    both = load_sweep(write(tmp_path / "b.yaml", set=own, runs=runs)).recipes()
    assert len(both) == 8
    assert [recipe.batch_size for recipe in both.values()].count(16) == 4


def test_what_is_trained_is_what_the_recipe_alone_would_be(file: Path, tmp_path: Path) -> None:
    entries = train(file, tmp_path / "out")
    assert [entry.name for entry in entries] == NAMES
    assert {entry.status for entry in entries} == {"complete"}
    alone = load_recipe(
        "he2025-two-head-quick", {**SWEEP["set"], "n_heads": 2, "noise_variance": 0.5}
    )
    expected = mechicl.train(alone, tmp_path / "alone", compile=False).params.load()
    found = mechicl.open_run(tmp_path / "out" / NAMES[3]).params.load()
    other = mechicl.open_run(tmp_path / "out" / NAMES[2]).params.load()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    assert not np.array_equal(other["W_Q"][:, -1], expected["W_Q"][:, -1])


def test_the_index_has_status_and_the_settings_that_vary(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(file, out)
    rows = index(out)
    assert [row["run"] for row in rows] == NAMES
    assert [row["model.n_heads"] for row in rows] == ["1", "1", "2", "2"]
    assert [row["task.noise_variance"] for row in rows] == ["0.1", "0.5", "0.1", "0.5"]
    assert {row["status"] for row in rows} == {"complete"}
    assert "optimizer.learning_rate" not in rows[0]
    assert [entry.document()["run"] for entry in sweep_index(file, out)] == NAMES


def test_what_is_complete_is_not_trained_again(file: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", []
    train(file, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/trajectory.zarr/**/*")}
    list(sweep(file, out, compile=False, notify=said.append))
    assert said == []
    assert len(before) > 20
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_interrupted_sweep_goes_on(file: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", []
    entries = sweep(file, out, compile=False)
    next(entries)
    entries.close()
    assert [row["status"] for row in index(out)] == ["complete", *["planned"] * 3]
    list(sweep(file, out, compile=False, notify=said.append))
    assert [text.rpartition("/")[2] for text in said] == NAMES[1:]
    assert {row["status"] for row in index(out)} == {"complete"}


def test_a_failure_is_listed_and_stops_nothing(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / NAMES[1]).mkdir(parents=True)
    (out / NAMES[1] / "letters.txt").write_text("mine")
    entries = train(file, out)
    assert [entry.status for entry in entries] == ["complete", "failed", "complete", "complete"]
    assert "letters.txt" in entries[1].reason
    assert "letters.txt" in index(out)[1]["reason"]
    # Another look says so too, and what is mended is trained.
    assert sweep_index(file, out)[1].status == "failed"
    (out / NAMES[1] / "letters.txt").unlink()
    assert {entry.status for entry in train(file, out)} == {"complete"}
    assert {row["reason"] for row in index(out)} == {""}


def test_a_run_that_another_process_trains_is_left_to_it(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / NAMES[0]).mkdir(parents=True)
    lock = RunLock(out / NAMES[0])
    try:
        entries = train(file, out)
    finally:
        lock.release()
    assert [entry.status for entry in entries] == ["running", *["complete"] * 3]
    assert {entry.status for entry in train(file, out)} == {"complete"}


@pytest.mark.parametrize("done", [False, True])
def test_a_run_that_another_process_begins_at_that_moment_has_not_failed(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """Both find nothing there, and one is first."""
    train_here, locks = trained.train, []

    def train_there(recipe: Recipe, place: Path, **options: object) -> object:
        monkeypatch.setattr(trained, "train", train_here)
        assert not place.exists()
        if done:
            train_here(recipe, place, compile=False)
        else:
            place.mkdir(parents=True)
            locks.append(RunLock(place))
            (place / "config.yaml").write_text("recipe: {}\n")
        return train_here(recipe, place, **options)

    monkeypatch.setattr(trained, "train", train_there)
    entry = next(sweep(file, tmp_path / "out", compile=False))
    for lock in locks:
        lock.release()
    assert entry.status == ("complete" if done else "running"), entry.reason


def test_what_another_process_has_done_meanwhile_is_seen(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / NAMES[0] / "mine").mkdir(parents=True)
    entries = sweep(file, out, compile=False)
    assert next(entries).status == "failed"
    (out / NAMES[0] / "mine").rmdir()
    recipes = load_sweep(file).recipes()
    for name in (NAMES[0], NAMES[3]):
        mechicl.train(recipes[name], out / name, compile=False)
    next(entries)
    entries.close()
    expected = ["complete", "complete", "planned", "complete"]
    assert [row["status"] for row in index(out)] == expected
    assert [entry.status for entry in sweep_index(file, out)] == expected


def test_a_damaged_run_is_listed_and_not_replaced(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(file, out)
    (out / NAMES[2] / "trajectory.zarr" / "zarr.json").write_text("{")
    entries = train(file, out)
    assert [entry.status for entry in entries] == ["complete", "complete", "failed", "complete"]
    assert (out / NAMES[2] / "trajectory.zarr" / "zarr.json").read_text() == "{"


def test_divergence_is_in_the_index(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rates.yaml",
        set=SWEEP["set"] | {"optimizer.name": "sgd", "n_steps": 60},
        grid={"learning_rate": [1e-3, 1e6]},
    )
    entries = train(file, tmp_path / "out")
    assert [entry.diverged for entry in entries] == [(), (0, 1)]
    assert [row["diverged"] for row in index(tmp_path / "out")] == ["", "0 1"]


def test_a_changed_sweep_is_refused_before_anything_is_trained(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    entries = sweep(file, out, compile=False)
    next(entries)
    entries.close()
    changed = write(file, set=SWEEP["set"] | {"n_steps": 5})
    with pytest.raises(InputError, match=rf"{NAMES[0]} \(n_steps: 4 -> 5\)"):
        sweep(changed, out, compile=False)
    assert not (out / NAMES[1]).exists()


def test_a_place_that_cannot_be_written_is_said_first(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(MechiclError, match="out"):
        sweep(file, tmp_path / "taken" / "out", compile=False)
    with pytest.raises(InputError, match="not a directory"):
        sweep(file, tmp_path / "taken", compile=False)


def test_long_and_equal_names_end_in_a_hash(tmp_path: Path) -> None:
    grid = {"seeds": [list(range(40)), list(range(41))], "covariance": [None, {"rho": 0.5}]}
    own = {key: value for key, value in SWEEP["set"].items() if key != "seeds"}
    names = list(load_sweep(write(tmp_path / "a.yaml", set=own, grid=grid)).recipes())
    assert len(set(names)) == 4
    assert all(len(name) <= 80 for name in names)
    first, second = _names([{"seeds": [1, 2], "d": 3}, {"seeds": "1-2", "d": 3}])
    assert first != second
    assert first.startswith("seeds-1-2_d-3-") and second.startswith("seeds-1-2_d-3-")


def test_a_recipe_file_is_found_beside_the_sweep(tmp_path: Path) -> None:
    recipe = load_recipe("he2025-two-head-quick", SWEEP["set"]).settings()
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe | {"name": "own"}))
    file = write(tmp_path / "a.yaml", recipe="own.yaml", set={})
    assert [r.batch_size for r in load_sweep(file).recipes().values()] == [8] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": {}}, "grid .* runs"),
        ({"grid": {"n_heads": []}}, "n_heads has no values"),
        ({"grid": {"n_heads": 3}}, "grid.n_heads: must be a valid list"),
        ({"grid": {"n_heads": [1, 1]}}, r"two runs set {'n_heads': 1}; leave one out"),
        ({"grid": {"n_heads": [1, 1.0]}}, r"n_heads-1 and n_heads-1\.0 are of the same settings"),
        ({"grid": {"n_haeds": [1, 2]}}, "run n_haeds-1: .*n_heads"),
        ({"grid": {"n_heads": [1, 0]}}, "run n_heads-0: .*n_heads"),
        ({"grid": {"d": [1, 2]}}, "d is set in two of set, grid and runs"),
        ({"grid": {"n_heads": list(range(1, 1000)), "seeds": [[0]] * 1000}}, "most"),
        ({"recipe": "he2025-two-haed"}, "did you mean"),
        ({"recipe": "absent.yaml"}, "no recipe file"),
        ({"scale": "papier"}, "no scale"),
        ({"gird": {}}, "did you mean 'grid'"),
        ({"name": "../up"}, "a name has letters from A to Z"),
        ({"runs": [{"n_heads": 2}]}, "n_heads is set in two"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_sweep(write(tmp_path / "a.yaml", **changes)).recipes()


def test_a_sweep_is_called_as_its_file_as_far_as_that_goes(tmp_path: Path) -> None:
    for name, called in (("two heads.v2", "two-heads.v2"), ("-größe", "gr-e"), ("ä", "sweep")):
        assert load_sweep(write(tmp_path / f"{name}.yaml")).name == called


def test_files_that_are_no_sweeps(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a path cannot be empty"):
        load_sweep("")
    with pytest.raises(InputError, match="no sweep file"):
        load_sweep(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(InputError, match="not a mapping"):
        load_sweep(tmp_path / "list.yaml")
