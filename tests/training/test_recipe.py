"""Recipes: what is accepted, what is refused, and in which words."""

from pathlib import Path

import pytest

from mechicl.errors import InputError
from mechicl.models.normalized_attention import NormalizedAttention
from mechicl.training import load_recipe, recipe_names, settings_digest, stored_recipe
from mechicl.training.recipe import OptimizerConfig, _full_key

QUICK = "he2025-two-head-quick"


def test_the_built_in_recipes_all_load() -> None:
    names, checked = recipe_names(), 0
    assert QUICK in names
    for name in names:
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description
        checked += 1
    assert checked == len(names) >= 1


def test_either_dash_finds_a_recipe() -> None:
    assert load_recipe(QUICK) == load_recipe(QUICK.replace("-", "_"))


def test_bare_and_dotted_keys_set_the_same() -> None:
    bare = load_recipe(QUICK, {"d": 7, "n-heads": 4, "learning_rate": 0.5, "n_steps": 3})
    dotted = load_recipe(
        QUICK,
        {"task.d": 7, "model.n_heads": 4, "optimizer.learning_rate": 0.5, "n_steps": 3},
    )
    assert bare == dotted
    assert (bare.task.d, bare.model.n_heads, bare.n_steps) == (7, 4, 3)


def test_name_of_a_section_is_not_the_recipes() -> None:
    """`name` at the top is the recipe's; those of task, model and optimizer need their section."""
    assert load_recipe(QUICK, {"name": "mine"}).name == "mine"
    assert load_recipe(QUICK, {"optimizer.name": "sgd"}).optimizer.name == "sgd"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"noise_varance": 1}, "did you mean 'task.noise_variance'"),
        ({"d": 0}, r"task\.d: .*greater than or equal to 1 \(given: 0\)"),
        ({"d": "five"}, r"task\.d: .*valid integer.*'five'"),
        ({"noise_variance": -1}, "greater than or equal to 0"),
        ({"seeds": []}, "seeds: .*at least 1"),
        ({"seeds": [1, 1]}, "seeds repeat"),
        ({"seeds": [-1]}, "greater than or equal to 0"),
        ({"n_steps": 0}, "n_steps: .*greater than or equal to 1"),
        ({"n_steps": 2**24 + 1}, "n_steps: .*less than or equal to 16777216"),
        ({"n_steps": 10**30, "every": None}, "n_steps: .*less than or equal to 16777216"),
        ({"every": None, "per_decade": 10**10}, r"smaller checkpoints\.per_decade"),
        ({"batch_size": 0}, "batch_size"),
        ({"optimizer.name": "adm"}, "'adam', 'adamw' or 'sgd'"),
        ({"learning_rate": 0}, "learning_rate: .*greater than 0"),
        ({"every": 0}, r"checkpoints\.every"),
        ({"task.name": "linear_regresion"}, "did you mean 'linear_regression'"),
        ({"seeds": [2**63]}, "seeds"),
        ({"n_heads": True}, r"model\.n_heads: .*True"),
        ({"noise_variance": False}, r"task\.noise_variance: .*False"),
        ({"seeds": [True]}, "seeds"),
        ({"name": "../elsewhere"}, "name: "),
        ({"name": "a b"}, "name: "),
        ({"name": ".hidden"}, "name: "),
        ({"name": ""}, "name: "),
        ({"d": 2, "task.d": 3}, r"task\.d is set twice"),
        ({"n_heads": 2, "model.n-heads": 2}, r"model\.n_heads is set twice"),
    ],
)
def test_bad_settings_are_refused(overrides: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe(QUICK, overrides)


def test_names_and_seeds_at_their_bounds_are_accepted() -> None:
    recipe = load_recipe(QUICK, {"name": "He-2025.v1_b", "seeds": [2**63 - 1]})
    assert (recipe.name, recipe.seeds) == ("He-2025.v1_b", (2**63 - 1,))


def test_a_bare_key_of_several_sections_is_refused_naming_them() -> None:
    with pytest.raises(InputError, match=r"one of several: a\.x, b\.x"):
        _full_key("x", {"a": {"x": 1}, "b": {"x": 2}})
    assert _full_key("b.x", {"a": {"x": 1}, "b": {"x": 2}}) == "b.x"


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InputError) as error:
        load_recipe(QUICK, {"d": 0, "batch_size": 0, "n_steps": -1})
    assert all(key in str(error.value) for key in ("task.d", "batch_size", "n_steps"))


def test_unknown_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"did you mean '{QUICK}'"):
        load_recipe("he2025-two-head-quik")
    with pytest.raises(InputError, match="no recipe file"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("- 1", "not a mapping"),
        ("task: {name: linear_regression}", "model: is required"),
        ("task: {}\nmodel: {name: softmax_attention}", "task: name is required"),
        (
            "task: {name: linear_regression}\nmodel: {name: softmax_attention}\nn_step: 1",
            "did you mean 'n_steps'",
        ),
        (
            "task: {name: linear_regression, d: 2, d: 3}\nmodel: {name: softmax_attention}",
            "d given twice",
        ),
        ("n_steps: 1\nn_steps: 2", "n_steps given twice"),
        (b"description: caf\xe9", "UTF-8"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message):
        load_recipe(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("task: {name: linear_regression, d: 2}\nmodel: {name: softmax_attention}\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.task.d) == ("mine", 2)


def test_digest_and_differences_are_of_what_decides_the_numbers() -> None:
    recipe = load_recipe(QUICK)
    renamed = load_recipe(QUICK, {"name": "other", "description": "words"})
    assert renamed.digest == recipe.digest
    assert recipe.differences(renamed) == []
    other = load_recipe(QUICK, {"d": 6, "n_steps": 5})
    assert recipe.differences(other) == ["n_steps: 10000 -> 5", "task.d: 5 -> 6"]


CHANGES = {
    "task.d": 6,
    "task.n_context": 7,
    "task.noise_variance": 0.2,
    "task.covariance": [[2, 0, 0, 0, 0], *([0] * i + [1] + [0] * (4 - i) for i in range(1, 5))],
    "model.name": "linear_attention",
    "model.n_heads": 3,
    "model.score_scale": 0.5,
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.5,
    "optimizer.betas": [0.8, 0.9],
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 1.0,
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 5,
    "batch_size": 7,
    "n_steps": 3,
    "training_set": 300,
    "seeds": [5],
    "checkpoints.every": 10,
    "checkpoints.per_decade": 3,
    "checkpoints.at": [7],
}


@pytest.mark.parametrize("key", CHANGES)
def test_digest_and_differences_see_every_setting(key: str) -> None:
    recipe, other = load_recipe(QUICK), load_recipe(QUICK, {key: CHANGES[key]})
    assert other.digest != recipe.digest
    (difference,) = recipe.differences(other)
    assert difference.startswith(f"{key}: ")


def test_a_setting_that_one_recipe_has_not_is_not_set() -> None:
    recipe = load_recipe(QUICK, {"d": 6})
    other = load_recipe(recipe, {"task.name": "multi_task_regression"})
    assert other.digest != recipe.digest
    assert recipe.differences(other) == [
        "task.name: 'linear_regression' -> 'multi_task_regression'",
        "task.supports: not set -> [[0, 1, 2, 3], [2, 3, 4, 5]]",
    ]
    assert other.differences(recipe)[1] == "task.supports: [[0, 1, 2, 3], [2, 3, 4, 5]] -> not set"


def test_no_setting_is_forgotten_above() -> None:
    settings = load_recipe(QUICK).settings()
    keys = {
        f"{section}.{key}" if isinstance(value, dict) else section
        for section, value in settings.items()
        for key in (value if isinstance(value, dict) else [""])
    }
    # dropout_on means nothing without a training_set, and has a test of its own below.
    assert keys - {"name", "description", "task.name", "dropout_on"} == set(CHANGES)


def test_a_section_may_be_given_whole() -> None:
    """It replaces all of the section; other keys are set over it, whatever their order."""
    base = load_recipe(QUICK, {"n_heads": 3, "score_scale": 0.5})
    square = {"name": "normalized-attention", "activation": "square"}
    recipe = load_recipe(base, {"model": square})
    assert recipe.model == NormalizedAttention(activation="square")
    assert recipe.task == base.task
    for overrides in (
        {"model": square, "n_heads": 5, "coefficient": 0.3},
        {"coefficient": 0.3, "model.n-heads": 5, "model": square},
    ):
        changed = load_recipe(base, overrides)
        expected = NormalizedAttention(activation="square", n_heads=5, coefficient=0.3)
        assert changed.model == expected
    several = load_recipe(QUICK, {"task": {"name": "multi_task_regression"}, "d": 8})
    assert (several.task.d, several.task.n_responses) == (8, 2)
    assert load_recipe(QUICK, {"optimizer": {"name": "sgd"}}).optimizer == OptimizerConfig(
        name="sgd"
    )
    assert load_recipe(QUICK, {"checkpoints": {"at": [7]}}).checkpoints.at == (7,)


def test_a_setting_may_become_a_mapping_and_cease_to_be_one() -> None:
    plain = load_recipe(QUICK)
    correlated = load_recipe(QUICK, {"covariance": {"rho": 0.5}})
    stronger = load_recipe(correlated, {"rho": 0.9})
    assert stronger == load_recipe(correlated, {"covariance": {"rho": 0.9}})
    assert stronger == load_recipe(correlated, {"task.covariance.rho": 0.9})
    assert load_recipe(correlated, {"task.covariance": None}) == plain
    digests = {recipe.digest for recipe in (plain, correlated, stronger)}
    assert len(digests) == 3
    assert plain.differences(correlated) == ["task.covariance: None -> {'rho': 0.5}"]
    assert correlated.differences(plain) == ["task.covariance: {'rho': 0.5} -> None"]
    assert correlated.differences(stronger) == ["task.covariance.rho: 0.5 -> 0.9"]
    again = stored_recipe({"recipe": correlated.settings()}, "config.yaml")
    assert again == correlated
    assert again.digest == correlated.digest


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model": "linear_attention"},
            r"model is a section; given 'linear_attention'.*model\.name=",
        ),
        ({"checkpoints": 5}, r"checkpoints is a section; given 5.*checkpoints=\{every: \.\.\.\}"),
        ({"model": {"n_heads": 4}}, "model: name is required"),
        ({"model": {"name": "linear_atention"}}, "did you mean 'linear_attention'"),
        ({"model": {"name": "linear_attention", "n_head": 4}}, "did you mean 'model.n_heads'"),
        ({"task": {"name": "linear_regression", "n_contxt": 4}}, "did you mean 'task.n_context'"),
        ({"optimizer": {"eps": -1}}, r"optimizer\.eps: .*greater than 0"),
        ({"covariance.rho": 0.5}, r"task\.covariance is null.*task\.covariance=\{rho: \.\.\.\}"),
        ({"covariance": {"rho": 2}}, r"task\.covariance\.rho: must be less than 1"),
        ({"covariance": "kms"}, r"task\.covariance: must be d rows of d numbers"),
        ({"covariance": [[True]], "d": 1}, r"task\.covariance: must not be a boolean"),
        ({"rho": 0.5}, "there is no setting 'rho'"),
        ({"model": {"name": "softmax_attention"}, "Model": {}}, "there is no setting 'Model'"),
    ],
)
def test_bad_sections_are_refused(overrides: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe(QUICK, overrides)


def test_a_mapping_and_a_part_of_it_are_not_both_set() -> None:
    correlated = load_recipe(QUICK, {"covariance": {"rho": 0.5}})
    for keys in (("covariance", "rho"), ("task.covariance.rho", "task.covariance")):
        given = {key: {"rho": 0.1} if key.endswith("covariance") else 0.1 for key in keys}
        with pytest.raises(InputError, match=f"is set twice, as '{keys[0]}' and as '{keys[1]}'"):
            load_recipe(correlated, given)


def test_overrides_leave_the_recipe_they_start_from() -> None:
    correlated = load_recipe(QUICK, {"covariance": {"rho": 0.5}})
    load_recipe(correlated, {"rho": 0.1, "model": {"name": "linear_attention"}})
    assert correlated.task.covariance.rho == 0.5
    assert correlated.model.name == "softmax_attention"


def test_settings_that_came_later_leave_old_digests_alone() -> None:
    """Runs made before a setting existed are found again, and open."""
    recipe = load_recipe("he2025-two-head-quick")
    before = {
        key: value
        for key, value in recipe.settings().items()
        if key not in ("training_set", "dropout_on")
    }
    for key in ("schedule", "warmup_steps"):
        del before["optimizer"][key]
    assert settings_digest(before) == recipe.digest
    assert load_recipe(recipe, {"schedule": "cosine"}).digest != recipe.digest
    assert load_recipe(recipe, {"warmup_steps": 10}).digest != recipe.digest
    assert load_recipe(recipe, {"training_set": 500}).digest != recipe.digest
    every = load_recipe(recipe, {"training_set": 500})
    first = load_recipe(recipe, {"training_set": 500, "dropout_on": "first_batch"})
    assert first.digest != every.digest
