"""What every configuration is: frozen, its keys known and given once, its numbers finite."""

import re
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml

from mechicl.errors import InputError


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


def _name(given: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given) is None:
        raise ValueError(
            "a name has letters from A to Z, digits, ., _ and -, and begins with a letter or digit"
        )
    return given


Name = Annotated[str, pydantic.AfterValidator(_name)]
"""What recipes and sweeps may be called: their runs are in directories of that name."""


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error, and not the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping, once it is known that no key comes twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"{', '.join(twice)} given twice{node.start_mark}")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """Return the settings in a user's YAML file, which is to be a `kind`: a recipe, a claim.

    Raises InputError for a file that is not there, cannot be read, or is no mapping in YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no {kind} file {str(path)!r}") from None
    except OSError as error:
        raise InputError(f"cannot read {kind} {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{str(path)!r} is not text (UTF-8), so it is no {kind}") from None
    return parse_yaml(text, f"{kind} {str(path)!r}")


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the settings in `text`; raise InputError naming `where` if it is no such YAML."""
    try:
        settings = yaml.load(text, UniqueKeys)
    except yaml.YAMLError as error:
        raise InputError(f"{where} is not YAML: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(f"{where} is not a mapping of settings")
    return settings
