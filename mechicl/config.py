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
        field = cls.model_fields[info.field_name or ""]
        if isinstance(given, bool) and field.annotation is not bool:
            raise ValueError("must not be a boolean")
        return given
