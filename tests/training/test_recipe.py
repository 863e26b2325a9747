"""Recipes: what is accepted, what is refused, and in which words."""

from pathlib import Path

import pytest

from mechicl.errors import InputError
from mechicl.training import load_recipe, recipe_names

QUICK = "he2025-two-head-quick"


def test_the_built_in_recipes_all_load() -> None:
    names = recipe_names()
    assert QUICK in names
    for name in names:
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description


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
        ({"batch_size": 0}, "batch_size"),
        ({"optimizer.name": "adm"}, "'adam', 'adamw' or 'sgd'"),
        ({"learning_rate": 0}, "learning_rate: .*greater than 0"),
        ({"every": 0}, r"checkpoints\.every"),
        ({"task.name": "linear_regresion"}, "did you mean 'linear_regression'"),
    ],
)
def test_bad_settings_are_refused(overrides: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe(QUICK, overrides)


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
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_recipe(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("task: {name: linear_regression, d: 2}\nmodel: {name: softmax_attention}\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.task.d) == ("mine", 2)


def test_digest_is_of_what_decides_the_numbers() -> None:
    recipe = load_recipe(QUICK)
    renamed = load_recipe(QUICK, {"name": "other", "description": "words"})
    assert renamed.digest == recipe.digest
    for change in ({"d": 6}, {"seeds": [5]}, {"score_scale": 0.5}, {"every": 10}):
        assert load_recipe(QUICK, change).digest != recipe.digest


def test_differences_name_the_keys() -> None:
    recipe = load_recipe(QUICK)
    other = load_recipe(QUICK, {"d": 6, "n_steps": 5})
    assert recipe.differences(other) == ["n_steps: 10000 -> 5", "task.d: 5 -> 6"]
    assert recipe.differences(recipe) == []
