import doctest

import pydantic
import pytest

from mechicl import errors
from mechicl.errors import (
    DamagedRunError,
    InputError,
    MechiclError,
    NothingToAnalyseError,
    RunLockedError,
    SchemaError,
    canonical,
    invalid,
    unknown,
)


def test_exit_codes():
    codes = {
        MechiclError: 1,
        DamagedRunError: 1,
        RunLockedError: 1,
        InputError: 2,
        SchemaError: 2,
        NothingToAnalyseError: 3,
    }
    for kind, code in codes.items():
        assert kind("x").exit_code == code
        assert isinstance(kind("x"), MechiclError)
    assert issubclass(InputError, ValueError)


def test_examples_in_docstrings():
    result = doctest.testmod(errors)
    assert result.failed == 0 and result.attempted >= 1


@pytest.mark.parametrize(
    ("given", "kept"), [("sign-matching", "sign_matching"), (" a ", "a"), ("a_b", "a_b")]
)
def test_canonical(given, kept):
    assert canonical(given) == kept


def test_unknown_names_what_was_given_what_is_near_and_what_is_known():
    error = unknown("task", "linear-regresion", ["markov", "linear_regression"])
    assert isinstance(error, InputError)
    assert str(error) == (
        "there is no task 'linear-regresion'; did you mean 'linear_regression'? "
        "Known: linear_regression, markov"
    )


def test_unknown_without_anything_near_or_known():
    assert str(unknown("task", "zzz", ["a"])) == "there is no task 'zzz'; Known: a"
    assert str(unknown("task", "zzz", [])) == "there is no task 'zzz'; Known: none"


class Settings(pydantic.BaseModel, extra="forbid"):
    rate: float
    steps: int = pydantic.Field(1, ge=1)
    name: str = "a"

    @pydantic.field_validator("name")
    @classmethod
    def _short(cls, value: str) -> str:
        if len(value) > 3:
            raise ValueError("too long")
        return value


def test_invalid_lists_every_fault_in_plain_words():
    with pytest.raises(pydantic.ValidationError) as caught:
        Settings(step=3, steps=0, name="abcd")
    text = str(invalid("recipe x", caught.value, known=Settings.model_fields))
    assert text.startswith("recipe x: ")
    faults = text.removeprefix("recipe x: ").split("; ")
    for part in (
        "rate: is required",
        "steps: must be greater than or equal to 1 (given: 0)",
        "name: too long (given: 'abcd')",
        "there is no setting 'step'",
        "did you mean 'steps'? Known: name, rate, steps",
    ):
        assert part in faults
    assert "Value error" not in text


def test_invalid_without_known_settings():
    with pytest.raises(pydantic.ValidationError) as caught:
        Settings(rate=1, colour=3)
    assert str(invalid("x", caught.value)) == "x: there is no setting 'colour'; Known: none"
