"""A study from runs on disk to one result, one table and its figures."""

import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import yaml
from numpy.testing import assert_array_equal

import mechicl
from mechicl.checkpoints import TrajectoryWriter, fingerprint
from mechicl.errors import InputError, MechiclError, NothingToAnalyseError
from mechicl.schema import flag_names
from mechicl.studies import parts, study
from tests import runs

PROBES = ["sign_matching", "circuits"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs that differ in heads, seeds and schedule, and signs."""
    root = tmp_path_factory.mktemp("many")
    runs.write(root / "a")
    runs.write(root / "b", seeds=[4, 7], mu=[[2.0, -2.0], [2.0, 2.0]], n_steps=60)
    runs.write(root / "c", n_heads=3, omega=(-0.2, 0.1, 0.2), mu=(-1, 1, 1), noise_variance=0.5)
    return root


@pytest.fixture
def copies(many: Path, tmp_path: Path) -> Path:
    """A copy of these runs that a test may harm."""
    return Path(shutil.copytree(many, tmp_path / "many"))


@pytest.fixture(scope="module")
def made(many: Path, tmp_path_factory: pytest.TempPathFactory) -> mechicl.Study:
    out = tmp_path_factory.mktemp("study") / "study.zarr"
    return mechicl.study(many, PROBES, out=out)


def part_files(out: Path) -> dict[Path, int]:
    """The finished parts beside a study, with their times."""
    found = (out.parent / f"{out.stem}-parts").glob("*/*.safetensors")
    return {path: path.stat().st_mtime_ns for path in found}


def test_each_number_is_that_of_the_run_by_itself(many: Path, made: mechicl.Study) -> None:
    assert made.failures == []
    assert made.runs["run_name"].values.tolist() == ["a", "b", "c"]
    checked = 0
    for probe in PROBES:
        joined = made.results[probe].load()
        for number, name in enumerate("abc"):
            alone = mechicl.open_run(many / name).analyze(probe)
            for variable in alone.data_vars:
                there = joined[variable].sel(run=number)
                for dim, size in alone[variable].sizes.items():
                    if dim == "step":
                        there = there.sel(step=alone["step"].values)
                    else:
                        there = there.isel({dim: slice(size)})
                assert_array_equal(there.values, alone[variable].values)
                checked += 1
    assert checked == 3 * (4 + 11)


def test_steps_and_heads_that_a_run_has_not_are_nan(made: mechicl.Study) -> None:
    result = made.results["circuits"]
    assert result["step"].values.tolist() == [0, 20, 40, 60, 80, 100]
    assert result["last_step"].values.tolist() == [100, 60, 100]
    assert np.isnan(result["omega"].sel(run=1, step=[80, 100])).all()
    assert np.isnan(result["omega"].sel(run=0).isel(head=2)).all()
    assert result["n_head"].values.tolist() == [2, 2, 3]
    assert result["seed_label"].sel(run=1).values.tolist() == [4, 7]
    code = result["undefined"].sel(run=1, step=100).isel(seed=0).item()
    assert flag_names(result["undefined"])[code] == "not_in_this_run"


def test_settings_are_coordinates_of_runs_and_results(made: mechicl.Study) -> None:
    assert made.runs["model.n_heads"].values.tolist() == [2, 2, 3]
    assert made.runs["task.name"].values.tolist() == ["linear_regression"] * 3
    assert made.runs["seeds"].values.tolist() == ["[0]", "[4, 7]", "[0]"]
    assert np.isnan(made.runs["training_set"]).all()
    assert made.runs["recipe"].values.tolist() == ["he2025-two-head-quick"] * 3
    result = made.results["sign_matching"]
    means = result["holds"].groupby("model.n_heads").mean(...)
    assert means["model.n_heads"].values.tolist() == [2, 3]
    assert means.sel({"model.n_heads": 3}).item() == 1
    chosen = result.where(result["task.noise_variance"] > 0.2, drop=True)
    assert chosen["run_name"].values.tolist() == ["c"]


def test_plain_xarray_opens_it_without_a_warning(made: mechicl.Study) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xr.open_datatree(made.path)
        one = xr.open_zarr(made.path, group="sign_matching")
    assert set(tree.children) == {"runs", *PROBES}
    assert tree["runs"].attrs["run_names"] == ["a", "b", "c"]
    assert_array_equal(one["holds"], made.results["sign_matching"]["holds"])
    assert all("units" in each.attrs for each in one.variables.values())


def test_the_table_has_a_row_a_run_probe_and_seed(made: mechicl.Study) -> None:
    table = made.table
    assert len(table) == 4 * len(PROBES)
    b = table[(table["run"] == "b") & (table["probe"] == "sign_matching")]
    assert b["seed"].tolist() == [4, 7]
    assert b["step"].tolist() == [60, 60]
    assert b["holds"].tolist() == [1, 0]
    assert b["sign_agreement"].tolist() == [1, 0.5]
    assert b["undefined"].tolist() == ["", ""]
    c = table[(table["run"] == "c") & (table["probe"] == "circuits")].iloc[0]
    np.testing.assert_allclose([c["omega_0"], c["omega_1"], c["omega_2"]], [0.2, 0.1, -0.2], 1e-5)
    np.testing.assert_allclose([c["mu_0"], c["mu_1"], c["mu_2"]], [1, 1, -1], 1e-5)
    assert np.isnan(table[table["run"] == "a"]["omega_2"]).all()
    assert table["task.n_context"].tolist() == [40.0] * 8


def test_the_files_beside_it(made: mechicl.Study) -> None:
    folder = made.path.parent
    csv = pd.read_csv(folder / "study.csv")
    assert len(csv) == len(made.table)
    assert {"model.n_heads", "task.noise_variance", "n_steps", "seeds"} <= set(csv)
    assert "task.n_context" not in csv, "it does not differ"
    figures = sorted(path.name for path in (folder / "study-figures").iterdir())
    assert figures == ["circuits.png", "sign_matching.png"]
    assert {path.name for path in folder.iterdir()} == {
        "study.zarr",
        "study.csv",
        "study-figures",
        "study-parts",
    }


def test_open_study_gives_it_back(made: mechicl.Study) -> None:
    again = mechicl.open_study(made.path)
    xr.testing.assert_identical(again.runs, made.runs)
    for probe in PROBES:
        xr.testing.assert_identical(again.results[probe].load(), made.results[probe].load())
    pd.testing.assert_frame_equal(again.table, made.table)
    assert (again.failures, again.join) == ([], "outer")
    assert "over 3 runs" in repr(again)


def test_without_out_nothing_is_left(
    many: Path, made: mechicl.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = mechicl.study(many, "sign_matching")
    assert list(tmp_path.iterdir()) == []
    assert found.path is None
    given = made.results["sign_matching"].load()
    xr.testing.assert_identical(found.results["sign_matching"], given)


@pytest.mark.parametrize("join", ["inner", "last"])
def test_other_joins(many: Path, join: str) -> None:
    found = mechicl.study(many, "sign_matching", join=join)
    result = found.results["sign_matching"]
    assert result.attrs["join"] == found.join == join
    if join == "inner":
        assert result["step"].values.tolist() == [0, 20, 40, 60]
        assert found.table["step"].tolist() == [60] * 4
    else:
        assert "step" not in result.dims
        assert found.table["step"].tolist() == [100, 60, 60, 100]
    assert found.table["holds"].tolist() == [1, 1, 0, 1]


def test_finished_parts_are_not_computed_again(copies: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.zarr"
    mechicl.study(copies, "sign_matching", out=out, figures=False)
    first = part_files(out)
    assert len(first) == 3
    mechicl.study(copies, PROBES, out=out, figures=False)
    second = part_files(out)
    assert len(second) == 6
    assert {path: second[path] for path in first} == first
    changed = {"sign_matching": {"dummy_threshold": 0.5}}
    mechicl.study(copies, "sign_matching", parameters=changed, out=out, figures=False)
    assert len(part_files(out)) == 9
    mechicl.study(copies, "sign_matching", out=out, figures=False, overwrite=True)
    third = part_files(out)
    assert len(third) == 9, "what was not asked for stays"
    assert all(third[path] > first[path] for path in first)


def test_a_part_that_was_cut_short_is_computed_again(copies: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.zarr"
    before = mechicl.study(copies, "sign_matching", out=out, figures=False).table
    for path in part_files(out):
        os.truncate(path, path.stat().st_size // 2)
    after = mechicl.study(copies, "sign_matching", out=out, figures=False)
    pd.testing.assert_frame_equal(after.table, before)


def test_a_run_that_went_on_is_computed_again_and_the_others_are_not(tmp_path: Path) -> None:
    runs.write(tmp_path / "many" / "done")
    growing = runs.write(tmp_path / "many" / "growing", stop=3)
    out = tmp_path / "s.zarr"
    first = mechicl.study(tmp_path / "many", "sign_matching", out=out, figures=False)
    assert first.runs["complete"].values.tolist() == [1, 0]
    assert first.table["step"].tolist() == [100, 40]
    before = part_files(out)
    with TrajectoryWriter.resume(growing) as writer:
        for index in range(3, 6):
            writer.add(runs.checkpoint(growing, index))
    second = mechicl.study(tmp_path / "many", "sign_matching", out=out, figures=False)
    assert second.table["step"].tolist() == [100, 100]
    after = part_files(out)
    assert len(after) == 2, "what is of the shorter run is gone"
    assert len({*before} & {*after}) == 1


def test_a_fingerprint_is_of_a_commit_and_of_a_run(copies: Path, tmp_path: Path) -> None:
    assert fingerprint(copies / "a") == fingerprint(copies / "a")
    assert fingerprint(copies / "a") != fingerprint(copies / "b")
    before = fingerprint(copies / "a")
    shutil.rmtree(copies / "a")
    runs.write(copies / "a")
    assert fingerprint(copies / "a") != before, "the same settings, trained again"
    assert fingerprint(tmp_path / "absent")


def test_a_probe_that_was_changed_is_computed_again(
    copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.zarr"
    mechicl.study(copies / "a", "sign_matching", out=out, figures=False)
    monkeypatch.setattr(parts, "_source", lambda probe: "another text")
    mechicl.study(copies / "a", "sign_matching", out=out, figures=False)
    assert len(part_files(out)) == 2


def damage(run: Path) -> None:
    for path in run.glob("trajectory.zarr/W_Q/c/**/*"):
        if path.is_file():
            path.write_bytes(b"\0" * path.stat().st_size)


def later_schema(run: Path) -> None:
    metadata = run / "trajectory.zarr" / "zarr.json"
    content = json.loads(metadata.read_text())
    content["attributes"] |= {"schema_version": 99, "mechicl_version": "9.9"}
    metadata.write_text(json.dumps(content))


def other_config(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["recipe"]["task"]["d"] = 7
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("harm", "probe", "said"),
    [
        (damage, "sign_matching", "W_Q"),
        (later_schema, "", "install mechicl 9.9"),
        (other_config, "", "not the one that the run was trained with"),
        (lambda run: (run / "config.yaml").unlink(), "", "config.yaml is missing"),
    ],
)
def test_one_run_that_cannot_be_read_stops_nothing(
    copies: Path, tmp_path: Path, harm: object, probe: str, said: str
) -> None:
    harm(copies / "b")
    found = mechicl.study(copies, "sign_matching", out=tmp_path / "s.zarr", figures=False)
    (failure,) = found.failures
    assert (failure.run, failure.probe, failure.kind) == (str(copies / "b"), probe, "failed")
    assert said in failure.reason
    assert found.results["sign_matching"]["run_name"].values.tolist() == ["a", "c"]
    assert mechicl.open_study(found.path).failures == [failure]
    assert set(found.table["run"]) == {"a", "c"}


@pytest.mark.parametrize("url", ["nonsense://x", "memory://absent"])
def test_a_url_that_cannot_be_read_stops_nothing(copies: Path, url: str) -> None:
    found = mechicl.study([copies, url], "sign_matching")
    (failure,) = found.failures
    assert (failure.run, failure.probe, failure.kind) == (url, "", "failed")
    assert found.results["sign_matching"]["run_name"].values.tolist() == ["a", "b", "c"]


def test_runs_that_a_probe_does_not_apply_to_are_told_again_and_again(
    copies: Path, tmp_path: Path
) -> None:
    """The second time it is read from the part, which is a refusal."""
    for _ in range(2):
        found = mechicl.study(
            copies, ["sign_matching", "head_permutation"], out=tmp_path / "s.zarr", figures=False
        )
        assert list(found.results) == ["sign_matching"]
        assert {(each.probe, each.kind) for each in found.failures} == {
            ("head_permutation", "does not apply")
        }
        assert len(found.failures) == 3
        assert all("lag_weights" in each.reason for each in found.failures)


def test_where_nothing_applies_it_is_said(copies: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingToAnalyseError, match="no probe applies") as refused:
        mechicl.study(copies, "head_permutation", out=tmp_path / "s.zarr")
    said = str(refused.value)
    assert all(str(copies / name) in said for name in "abc")
    assert said.count("head_permutation does not apply") == 1, "a reason is said once"
    for name in "abc":
        damage(copies / name)
    with pytest.raises(MechiclError, match="no run gave a result") as caught:
        mechicl.study(copies, "sign_matching", out=tmp_path / "s.zarr")
    assert caught.value.exit_code == 1
    assert not (tmp_path / "s.zarr").exists()


def test_a_run_without_a_checkpoint_is_nothing_to_analyse(tmp_path: Path) -> None:
    runs.write(tmp_path / "begun", stop=0)
    with pytest.raises(NothingToAnalyseError, match="has no checkpoint yet"):
        mechicl.study(tmp_path / "begun", "sign_matching")


def no_run_is_opened(*_: object) -> None:
    raise AssertionError("a run was opened")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"probes": "sign_matchng"}, "did you mean 'sign_matching'"),
        ({"probes": []}, "no probe was named"),
        ({"parameters": {"sign_matching": {"threshold": 1}}}, "there is no setting 'threshold'"),
        ({"parameters": {"sign_matching": {"dummy_threshold": 2}}}, "must be less than 1"),
        ({"parameters": {"circuits": {}}}, "no probe in this study with parameters 'circuits'"),
        ({"join": "left"}, "no way to join steps 'left'.*inner"),
        ({"out": "study"}, r"ends in \.zarr"),
        ({"out": "memory://study.zarr"}, "is a URL"),
        ({"jobs": 0}, "jobs is an integer from 1"),
        ({"against": "a"}, "holds a run against others"),
        ({"runs": "absent"}, "there is no absent"),
    ],
)
def test_a_wrong_request_is_answered_before_a_run_is_opened(
    copies: Path, monkeypatch: pytest.MonkeyPatch, options: dict, said: str
) -> None:
    monkeypatch.chdir(copies)
    if "against" not in options:
        monkeypatch.setattr(parts, "open_run", no_run_is_opened)
    given = {"runs": ["a"], "probes": "sign_matching", "out": copies / "s.zarr"} | options
    with pytest.raises(InputError, match=said):
        mechicl.study(given.pop("runs"), given.pop("probes"), **given)
    assert sorted(path.name for path in copies.iterdir()) == ["a", "b", "c"]


def test_places_that_are_something_else_are_left_alone(copies: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.zarr").mkdir()
    (tmp_path / "mine.zarr" / "zarr.json").write_text("{}")
    for out, said in (
        (tmp_path / "mine.zarr", "is no study; it is left as it is"),
        (copies / "a" / "trajectory.zarr", "lies in a run"),
        (copies / "a" / "s.zarr", "lies in a run"),
    ):
        with pytest.raises(InputError, match=said):
            mechicl.study(copies, "sign_matching", out=out)
    assert (tmp_path / "mine.zarr" / "zarr.json").read_text() == "{}"
    with pytest.raises(InputError, match="is no study"):
        mechicl.open_study(tmp_path / "mine.zarr")
    with pytest.raises(InputError, match="is no study"):
        mechicl.open_study(tmp_path / "absent.zarr")


@pytest.mark.parametrize("name", ["s.csv", "s.parquet", "s-figures"])
def test_files_that_are_of_no_study_are_left_alone(copies: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=rf"{name} is there, and no s\.zarr that it belongs to"):
        mechicl.study(copies, "sign_matching", out=tmp_path / "s.zarr")
    assert (tmp_path / name).read_text() == "mine"


def test_a_result_that_a_worker_wrote_elsewhere_is_missed(
    copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "run_jobs", lambda asked, **_: [])
    with pytest.raises(MechiclError, match="workers and this machine need one file system"):
        mechicl.study(copies, "sign_matching", out=tmp_path / "s.zarr")


@pytest.mark.parametrize("name", ["runs/last_step", "sign_matching/seed_label"])
def test_what_is_lost_or_altered_of_a_study_is_told_and_made_anew(
    copies: Path, tmp_path: Path, name: str
) -> None:
    """Zarr itself takes a chunk that is not there for NaN, and altered bytes for numbers."""
    out = tmp_path / "s.zarr"
    made = mechicl.study(copies, "sign_matching", out=out, figures=False)
    (out / ".DS_Store").write_text("of a file manager")
    (chunk,) = (path for path in (out / name / "c").rglob("*") if path.is_file())
    whole = chunk.read_bytes()
    for harm in (lambda: chunk.unlink(), lambda: chunk.write_bytes(whole[:-6] + bytes(6))):
        harm()
        with pytest.raises(MechiclError, match=r"not what was written: .* makes it anew"):
            _ = mechicl.open_study(out).table
        with pytest.raises(MechiclError, match=r"not what was written: .* makes it anew"):
            mechicl.report(out)
        assert not out.with_name("s-report.html").exists()
        again = mechicl.study(copies, "sign_matching", out=out, figures=False)
        assert again.table.equals(made.table)
        assert mechicl.open_study(out).table.equals(made.table)


def test_a_study_may_be_a_link_to_another_disk(copies: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "real.zarr").mkdir(parents=True)
    out = tmp_path / "s.zarr"
    out.symlink_to(tmp_path / "disk" / "real.zarr")
    for _ in range(2):
        mechicl.study(copies, "sign_matching", out=out, figures=False)
    assert out.is_symlink()
    assert list(mechicl.open_study(tmp_path / "disk" / "real.zarr").results) == ["sign_matching"]


def test_files_of_an_earlier_study_are_left_and_named(copies: Path, tmp_path: Path) -> None:
    told: list[str] = []
    out = tmp_path / "s.zarr"
    mechicl.study(copies, ["circuits", "sign_matching"], out=out, notify=told.append)
    (tmp_path / "s.parquet").write_bytes(b"of the first")
    assert told == []
    mechicl.study(copies / "a", "sign_matching", out=out, notify=told.append)
    (said,) = told
    assert said.endswith("not made anew: s.parquet, s-figures/circuits.png")
    assert (tmp_path / "s-figures" / "circuits.png").exists()


def test_a_study_of_a_later_version_is_refused(copies: Path, tmp_path: Path) -> None:
    found = mechicl.study(copies, "sign_matching", out=tmp_path / "s.zarr", figures=False)
    metadata = found.path / "zarr.json"
    metadata.write_text(metadata.read_text().replace('"study_schema": 1', '"study_schema": 2'))
    with pytest.raises(InputError, match="this version reads up to 1"):
        mechicl.open_study(found.path)


def test_a_result_above_the_limit_is_refused_and_its_parts_are_kept(
    copies: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"over the limit of 9.3e-08 GiB; finished parts are kept"):
        mechicl.study(copies, "sign_matching", out=tmp_path / "s.zarr", limit=100)
    assert len(part_files(tmp_path / "s.zarr")) == 3
    assert not (tmp_path / "s.zarr").exists()


def test_mixed_tasks_have_the_settings_of_both(copies: Path) -> None:
    runs.write(copies / "d", noise_variance=0.3, covariance={"rho": 0.5})
    found = mechicl.study(copies, "sign_matching")
    assert found.runs["task.covariance.rho"].values.tolist()[-1] == 0.5
    assert np.isnan(found.runs["task.covariance.rho"].values[:3]).all()


def test_parquet_needs_pyarrow_and_says_so(
    copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.zarr"
    found = mechicl.study(copies, "sign_matching", out=out, parquet=True, figures=False)
    read = pd.read_parquet(tmp_path / "s.parquet")
    pd.testing.assert_frame_equal(read, found.frame(all_columns=False), check_dtype=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        mechicl.study(copies, "sign_matching", out=out, parquet=True)


def test_studies_are_there_from_the_module(made: mechicl.Study) -> None:
    assert study.files_of(made.path)["csv"] == made.path.with_suffix(".csv")
    with pytest.raises(InputError, match="no probe in this study 'head_roles'"):
        made.figure("head_roles")
