"""Claims as data: every one that comes with mechicl is whole, and verdicts mean what they say."""

import math
from pathlib import Path

import pytest

from mechicl.errors import InputError
from mechicl.studies import checks
from mechicl.studies.claims import Claim, chosen, claim_names, load_claim, verdict, wilson
from mechicl.training import load_recipe, recipe_scales

MINIMAL = {
    "id": "paper.one",
    "statement": "x is two",
    "source": "Fig. 1",
    "check": "probe_holds",
    "published": {"x": 2.0},
    "comparison": "relative",
    "tolerance": 0.1,
    "tolerance_reason": "one digit",
}


def claim(**changes: object) -> Claim:
    return Claim.model_validate(MINIMAL | changes)


def test_all_claims_of_he2025_are_here() -> None:
    assert {name for name in claim_names() if name.startswith("he2025.")} == {
        f"he2025.{name}"
        for name in (
            "anisotropic",
            "approx_loss",
            "bayes_ratio",
            "circuits",
            "dgd_limit",
            "dynamics",
            "gd_stages",
            "heads",
            "length",
            "linear_as_softmax",
            "manifold",
            "multitask",
            "predictor",
            "signs",
            "single_head",
            "table1",
        )
    }


PUBLISHED_STEPS = {"he2025": {500_000}, "yuksel2026": {2000}, "raj2026": {20_000, 40_000}}


def test_every_claim_is_whole() -> None:
    runs = 0
    for name in claim_names():
        read = load_claim(name)
        assert read.id == name
        assert read.statement and read.source and read.tolerance_reason
        checks.get(read.check).resolve(read.parameters)
        for needed in read.runs.values():
            load_recipe(needed.recipe, dict(needed.set))
            assert "paper" in recipe_scales(needed.recipe)
            scaled = load_recipe(needed.recipe, dict(needed.set), scale="paper")
            assert scaled.n_steps in PUBLISHED_STEPS[read.paper]
            runs += 1
    assert runs >= 20


def test_every_check_has_a_claim_that_uses_it() -> None:
    used = {load_claim(name).check for name in claim_names()}
    assert set(checks.names()) == used


def test_all_claims_of_yuksel2026_are_here() -> None:
    names = ("context_kl", "dataset_size", "gradient_flow", "importance", "init_scale", "stages")
    assert chosen(["yuksel2026"]) == [f"yuksel2026.{name}" for name in names]


def test_all_claims_of_raj2026_are_here() -> None:
    names = [
        "function_vector",
        "gaussian",
        "key_patching",
        "no_adaptivity_gaussian",
        "strategies",
        "tree",
    ]
    assert chosen(["raj2026"]) == [f"raj2026.{name}" for name in names]


def test_claims_about_seeds_have_sixteen() -> None:
    counted = 0
    minimal = load_claim("yuksel2026.stages").runs["minimal"]
    assert len(load_recipe(minimal.recipe, dict(minimal.set)).seeds) == 16
    for name in ("he2025.circuits", "he2025.signs", "he2025.heads"):
        for needed in load_claim(name).runs.values():
            assert len(load_recipe(needed.recipe).seeds) >= 16
            counted += 1
    assert counted == 8


@pytest.mark.parametrize(
    ("comparison", "met", "not_met"),
    [
        ("relative", [1.81, 2.19, 2.0], [1.79, 2.21, -2.0, math.nan, math.inf]),
        ("absolute", [1.91, 2.09], [1.89, 2.11, math.nan]),
        ("at_most", [-5.0, 2.09], [2.11, math.nan, math.inf]),
        ("at_least", [1.91, 50.0, math.inf], [1.89, math.nan]),
    ],
)
def test_what_meets_a_published_value(
    comparison: str, met: list[float], not_met: list[float]
) -> None:
    read = claim(comparison=comparison)
    assert [read.met("x", value) for value in met] == [True] * len(met)
    assert [read.met("x", value) for value in not_met] == [False] * len(not_met)


def test_a_relative_tolerance_is_of_negative_values_too() -> None:
    read = claim(published={"x": -2.0})
    assert read.met("x", -2.1) and not read.met("x", 2.0)


def test_each_quantity_may_have_a_tolerance_of_its_own() -> None:
    read = claim(published={"x": 2.0, "y": 2.0}, tolerance={"x": 0.01, "y": 0.5})
    assert not read.met("x", 2.1) and read.met("y", 2.1)


def test_verdicts() -> None:
    assert verdict([True, True]) == "reproduced"
    assert verdict([True, False]) == "partly"
    assert verdict([False, False]) == "not reproduced"
    assert verdict([]) == "not reproduced"


@pytest.mark.parametrize(("n_met", "n"), [(0, 4), (3, 4), (13, 16), (16, 16)])
def test_wilsons_interval(n_met: int, n: int) -> None:
    """Roots of (p̂ − p)² = z² p(1 − p)/n."""
    z = 1.959963984540054
    for p in wilson(n_met, n):
        assert (n_met / n - p) ** 2 == pytest.approx(z**2 * p * (1 - p) / n, abs=1e-12)
    low, high = wilson(n_met, n)
    assert 0 <= low <= n_met / n <= high <= 1 and low < high
    assert wilson(0, 0) == (0.0, 1.0)


def test_claims_are_chosen_by_id_by_paper_and_all_once_each() -> None:
    assert chosen(["he2025.table1"]) == ["he2025.table1"]
    assert chosen(["all"]) == list(claim_names())
    assert chosen(["he2025.table1", "he2025"])[0] == "he2025.table1"
    assert len(chosen(["he2025.table1", "he2025"])) == 16
    with pytest.raises(InputError, match=r"did you mean 'he2025\.table1'"):
        chosen(["he2025.tabel1"])
    with pytest.raises(InputError, match="there is no claim 'he2026'"):
        chosen(["he2026"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tolerance": -0.1}, "greater than or equal to 0"),
        ({"tolerance": {"x": -0.1}}, "greater than or equal to 0"),
        ({"tolerance": {"y": 0.1}}, "tolerance names"),
        ({"published": {}}, "at least 1"),
        ({"published": {"x": 0.0}}, "other than 0"),
        ({"comparison": "near"}, "'relative'"),
        ({"verdict": "yes"}, "there is no setting 'verdict'"),
        ({"id": "no paper"}, "pattern"),
    ],
)
def test_what_is_no_claim_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    import yaml

    path = tmp_path / "paper.one.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | change))
    with pytest.raises(InputError, match=message):
        load_claim(path)


def test_files_that_are_no_claims(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no claim file"):
        load_claim(tmp_path / "absent.yaml")
    for text, message in (
        ("- a", "not a mapping"),
        ("{", "not YAML"),
        ("{id: paper.x}", "required"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            load_claim(path)
    path.write_bytes(b"statement: \xff\xfe")
    with pytest.raises(InputError, match="not text"):
        load_claim(path)
