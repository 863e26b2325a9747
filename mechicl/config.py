"""What every configuration is: frozen, its keys known and given once, its numbers finite."""

from typing import Any

import pydantic
import yaml


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


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error, and not the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping, once it is known that no key comes twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"{', '.join(twice)} given twice{node.start_mark}")
        return super().construct_mapping(node, deep)
