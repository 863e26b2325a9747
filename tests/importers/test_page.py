"""What docs/import.md shows works."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from mechicl.importers.check import read_outputs
from mechicl.importers.mapping import load_mapping, mapping_names
from mechicl.training import Recipe, load_recipe
from tests.importers import theirs

PAGE = (Path(__file__).parents[2] / "docs" / "import.md").read_text()


def test_the_mapping_of_the_page_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    recipe = Recipe.model_validate(theirs.REGRESSION)
    found = load_mapping(yaml.safe_load(text), recipe.model, recipe.task)
    assert found.parameters["W_K"].parts == {"qkv": (1, 3)}


def test_every_built_in_mapping_has_a_line_whose_recipe_is_there() -> None:
    lines = dict(re.findall(r"\| `(\w+)` \| .* \| `(mechicl import [^`]*)`", PAGE))
    assert set(lines) == set(mapping_names())
    for line in lines.values():
        words = shlex.split(line)
        name = words[words.index("--recipe") + 1]
        changes = [words[at + 1].split("=") for at, word in enumerate(words) if word == "--set"]
        if name != "mine.yaml":
            assert load_recipe(name, {key: float(value) for key, value in changes})


def test_outputs_are_written_as_the_page_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [
        text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "npz" in text
    ]
    monkeypatch.chdir(tmp_path)
    given = {
        "load_recipe": lambda _: Recipe.model_validate(theirs.REGRESSION),
        "my_model": theirs.StackedAttention(),
        "np": np,
        "torch": torch,
    }
    exec(compile(block, "docs/import.md", "exec"), given)
    (outputs,) = read_outputs("outputs.npz")
    assert (outputs.seed, outputs.step, outputs.outputs.shape) == (0, 5000, (64,))
