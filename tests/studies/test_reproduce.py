"""Reproducing: runs are trained once and reused, records are whole, verdicts add up."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from mechicl.checkpoints.layout import TRAJECTORY
from mechicl.errors import DamagedRunError, InputError, MechiclError
from mechicl.run import open_run
from mechicl.studies import reproduce
from mechicl.studies.reproduce import run_directory
from mechicl.training import load_recipe

RECIPE = {
    "task": {"name": "linear_regression", "d": 2, "n_context": 5},
    "model": {"name": "softmax_attention", "n_heads": 2},
    "batch_size": 8,
    "n_steps": 40,
    "seeds": [0, 1, 2],
    "checkpoints": {"every": 10, "per_decade": 0},
    "scales": {"paper": {"n_steps": 60}},
}
CLAIM = {
    "statement": "signs match",
    "source": "nowhere",
    "check": "probe_holds",
    "parameters": {"probes": ["sign_matching"]},
    "published": {"sign_matching": 1},
    "comparison": "at_least",
    "tolerance": 0,
    "tolerance_reason": "yes or no",
}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Return a claim's file and where runs and records go; the claim needs one tiny run."""
    recipe, claim = tmp_path / "tiny.yaml", tmp_path / "paper.signs.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    claim.write_text(yaml.safe_dump(CLAIM | {"runs": {"tiny": {"recipe": str(recipe)}}}))
    return claim, tmp_path / "out"


def changed(claim: Path, **changes: object) -> Path:
    path = claim.with_name("paper.other.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(claim.read_text()) | changes))
    return path


def test_runs_are_trained_once_and_shared(files: tuple[Path, Path]) -> None:
    claim, out = files
    other, said = (
        changed(
            claim,
            check="probe_value",
            parameters={"probe": "head_roles", "variables": ["n_positive"]},
            published={"n_positive": 1},
        ),
        [],
    )
    records = list(reproduce([str(claim), str(other)], out, compile=False, notify=said.append))
    assert [record.claim.id for record in records] == ["paper.signs", "paper.other"]
    assert len(said) == 1 and said[0].startswith("training ")
    assert len(list((out / "runs").iterdir())) == 1
    again: list[str] = []
    list(reproduce(str(claim), out, compile=False, notify=again.append))
    assert again == []


def test_an_interrupted_run_goes_on(files: tuple[Path, Path]) -> None:
    claim, out = files
    [whole] = reproduce(str(claim), out, compile=False, figure=False)
    recipe = load_recipe(claim.with_name("tiny.yaml"))
    expected = open_run(run_directory(recipe, out)).params.load()

    class Stop(Exception):
        pass

    from contextlib import contextmanager

    def stop(progress: object) -> None:
        if progress.step >= 20:
            raise Stop

    @contextmanager
    def watch(recipe: object):
        yield {"on_progress": stop}

    elsewhere = out.with_name("elsewhere")
    with pytest.raises(Stop):
        list(reproduce(str(claim), elsewhere, compile=False, watch=watch))
    assert not open_run(run_directory(recipe, elsewhere)).complete
    said: list[str] = []
    [record] = reproduce(str(claim), elsewhere, compile=False, notify=said.append, figure=False)
    assert said[0].startswith("going on with ")
    assert record.verdict == whole.verdict
    assert open_run(run_directory(recipe, elsewhere)).params.load().identical(expected)


def kept(claim: Path, out: Path) -> Path:
    return run_directory(load_recipe(claim.with_name("tiny.yaml")), out)


@pytest.mark.parametrize("left", ["no commit", "no trajectory"])
def test_a_run_cut_short_before_its_first_commit_is_no_dead_end(
    files: tuple[Path, Path], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill leaves it, which closes nothing and commits nothing."""
    claim, out = files
    [whole] = reproduce(str(claim), out, compile=False, figure=False)
    expected = open_run(kept(claim, out)).params.load()
    elsewhere = out.with_name("elsewhere")

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("mechicl.training.loop.one_thread_an_operation", die)
        list(reproduce(str(claim), elsewhere, compile=False))
    if left == "no trajectory":
        shutil.rmtree(kept(claim, elsewhere) / TRAJECTORY)
    [record] = reproduce(str(claim), elsewhere, compile=False, figure=False)
    assert record.verdict == whole.verdict
    assert open_run(kept(claim, elsewhere)).params.load().identical(expected)


def test_a_run_of_another_recipe_is_not_measured(files: tuple[Path, Path]) -> None:
    claim, out = files
    recipe = str(claim.with_name("tiny.yaml"))
    other = changed(claim, runs={"tiny": {"recipe": recipe, "set": {"n_heads": 3}}})
    [record] = reproduce(str(other), out, compile=False, figure=False)
    Path(record.runs["tiny"]).rename(kept(claim, out))
    with pytest.raises(DamagedRunError, match=r"claim paper.signs: .*model.n_heads: 2 -> 3.*remov"):
        list(reproduce(str(claim), out, compile=False))
    assert not (out / "claims" / "paper.signs.json").exists()


def test_a_damaged_run_is_named_and_trained_again_once_removed(files: tuple[Path, Path]) -> None:
    claim, out = files
    [whole] = reproduce(str(claim), out, compile=False, figure=False)
    shutil.rmtree(kept(claim, out) / TRAJECTORY / "W_K" / "c")
    with pytest.raises(DamagedRunError, match=r"W_K.*whose directory is removed is trained again"):
        list(reproduce(str(claim), out, compile=False))
    shutil.rmtree(kept(claim, out))
    [record] = reproduce(str(claim), out, compile=False, figure=False)
    assert record.verdict == whole.verdict


@pytest.mark.parametrize("taken", ["claims", "runs"])
def test_where_nothing_can_be_written_nothing_is_trained(
    files: tuple[Path, Path], taken: str
) -> None:
    claim, out = files
    out.mkdir()
    (out / taken).write_text("")
    said: list[str] = []
    with pytest.raises(MechiclError, match=r"cannot make the directory .*--out"):
        list(reproduce(str(claim), out, compile=False, notify=said.append))
    assert said == []


def test_two_claims_of_one_id_are_refused(files: tuple[Path, Path]) -> None:
    claim, out = files
    twin = claim.parent / "other" / claim.name
    twin.parent.mkdir()
    shutil.copy(claim, twin)
    with pytest.raises(InputError, match=r"called paper\.signs"):
        reproduce([str(claim), str(twin)], out, compile=False)


def test_the_figure_of_values_has_those_published_alone(files: tuple[Path, Path]) -> None:
    from mechicl.studies.checks import Measurement
    from mechicl.studies.claims import load_claim
    from mechicl.studies.reproduce import Record, _quantities, _table

    claim, _ = files
    stated = load_claim(claim)
    measured = (
        Measurement("sign_matching", 1.0, seed=0),
        Measurement("other", 1e6, seed=0),
        Measurement("other", 2e6, seed=1),
    )
    quantities = _quantities(stated, measured)
    table = _table(Record(stated, "reproduced", quantities, {}, 0.0, None))
    assert table["quantity"].values.tolist() == ["sign_matching"]
    assert table["measured"].shape == (1, 1)


def test_the_record_on_disk_is_the_record(files: tuple[Path, Path]) -> None:
    claim, out = files
    [record] = reproduce(str(claim), out, compile=False)
    stored = json.loads((out / "claims" / "paper.signs.json").read_text())
    assert stored == json.loads(json.dumps(record.document()))
    assert stored["verdict"] == record.verdict
    [quantity] = stored["quantities"]
    assert [each["seed"] for each in quantity["measurements"]] == [0, 1, 2]
    assert quantity["n_counted"] == 3
    assert quantity["n_met"] == sum(each["value"] == 1 for each in quantity["measurements"])
    assert Path(stored["figure"]).read_bytes()[:4] == b"\x89PNG"
    assert stored["claim"]["published"] == {"sign_matching": 1}


def test_a_claim_that_nothing_meets_is_not_reproduced(files: tuple[Path, Path]) -> None:
    claim, out = files
    wrong = changed(claim, published={"sign_matching": 2})
    [record] = reproduce(str(wrong), out, compile=False, figure=False)
    assert record.verdict == "not reproduced"
    assert record.figure is None
    assert not (out / "claims" / "paper.other.png").exists()


def test_seeds_that_are_left_out_do_not_count(files: tuple[Path, Path]) -> None:
    """`single_sign` cannot hold for a model in which head_roles does not: left out, with reason."""
    claim, out = files
    only = changed(claim, parameters={"probes": ["sign_matching"], "only_where": "head_roles"})
    [record] = reproduce(str(only), out, compile=False, figure=False)
    run = open_run(next((out / "runs").iterdir()))
    both = run.analyze("head_roles")["since"].notnull().values
    [quantity] = record.quantities
    assert [not each.excluded for each in quantity.measurements] == both.tolist()
    assert quantity.n_counted == both.sum()
    reasons = {each.excluded for each in quantity.measurements} - {""}
    assert all("positive and a negative" in reason for reason in reasons)


def test_another_scale_is_another_run(files: tuple[Path, Path]) -> None:
    claim, out = files
    [record] = reproduce(str(claim), out, scale="paper", compile=False, figure=False)
    [path] = record.runs.values()
    assert path.name.startswith("tiny-paper-")
    assert open_run(path).steps[-1] == 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"check": "probe_hold"}, "did you mean 'probe_holds'"),
        ({"parameters": {"probe": "sign_matching"}}, "probes"),
        ({"runs": {"tiny": {"recipe": "he2025-tow-head"}}}, "did you mean 'he2025-two-head"),
        ({"parameters": {"probes": ["sign_machting"]}}, "did you mean 'sign_matching'"),
        (
            {"parameters": {"probes": ["sign_matching"], "settings": {"sign_matching": {"x": 1}}}},
            "there is no setting 'x'",
        ),
    ],
)
def test_mistakes_cost_nothing(
    files: tuple[Path, Path], change: dict[str, object], message: str
) -> None:
    claim, out = files
    with pytest.raises(InputError, match=message):
        reproduce(str(changed(claim, **change)), out, compile=False)
    with pytest.raises(InputError, match="there is no scale"):
        reproduce(str(claim), out, scale="papper", compile=False)
    assert not out.exists()


def test_a_quantity_that_is_not_measured_is_named(files: tuple[Path, Path]) -> None:
    claim, out = files
    other = changed(claim, published={"sign": 1})
    with pytest.raises(InputError, match=r"measures \['sign_matching'\], not \['sign'\]"):
        list(reproduce(str(other), out, compile=False))
