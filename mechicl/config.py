"""What every configuration is: frozen, its keys known, its numbers finite and no booleans."""

from typing import Any

import pydantic


class Config(pydantic.BaseModel):
    """A frozen set of settings that refuses unknown keys, NaN, infinities, and yes for a number."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, given: Any, info: pydantic.ValidationInfo) -> Any:
        """Pydantic takes True for 1; in a recipe or a --set it is a slip."""
        if cls.model_fields[info.field_name or ""].annotation is not bool and _has_boolean(given):
            raise ValueError("must not be a boolean")
        return given


def _has_boolean(given: Any) -> bool:
    if isinstance(given, (list, tuple)):
        return any(_has_boolean(item) for item in given)
    return isinstance(given, bool)
