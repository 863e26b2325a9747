"""Mappings: which of their tensors is which of our parameters, and how its axes lie."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from mechicl.config import Config, parse_yaml, read_yaml
from mechicl.errors import InputError, invalid, unknown
from mechicl.models import Model
from mechicl.paths import expanded
from mechicl.schema import Var
from mechicl.tasks import Task

OURS = "mechicl"
"""The built-in mapping of our own names, which is made from a model's declarations."""

_FOLDER = "mappings"
_LAYOUT = "(head d_head) d_model"
_EXAMPLE = f'W_Q: {{from: "layers.{{layer}}.q.weight", layout: "{_LAYOUT}"}}'
_PART = re.compile(r"(\d+) of (\d+)")
_TOKEN = re.compile(r"\(|\)|[A-Za-z_]\w*|1|\S")
_PLACEHOLDER = re.compile(r"\{(\w*)\}")


class Rule(Config):
    """Where one of our parameters comes from.

    Attributes
    ----------
    source
        `from` in YAML: the name of their tensor, or several to try in turn, the first that is there
        counting. `{layer}`, or another of our dims in braces, stands for each index of that dim,
        from 0; `*` for anything.
    layout
        Axes of their tensor by our names, as einops writes them, such as `(head d_head) d_model`:
        a group in brackets is one axis of theirs, its last name running fastest. What is in braces
        in `from` has no axis; one of ours of size 1 may be left out, and theirs is written `1`.
    part
        Which part of an axis that is theirs alone, such as `{qkv: 0 of 3}` with the layout
        `d_model (qkv head d_head)`.
    sizes
        Sizes of those of our axes that have another one in theirs, such as `{d_head: 3}`. Where
        theirs is shorter, the rest of ours is 0; where it is longer, the rest of theirs is cut.
    scale
        Factor on the values; `temperature` is that of the task.
    fill
        Their model has no such parameter: one number in its place, such as 0 for a bias.
    """

    source: Annotated[
        tuple[str, ...] | None,
        pydantic.Field(alias="from"),
        pydantic.BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
    ] = None
    layout: str | None = None
    part: Mapping[str, str] = pydantic.Field(default_factory=dict)
    sizes: Mapping[str, Annotated[int, pydantic.Field(ge=1)]] = pydantic.Field(default_factory=dict)
    scale: float | Literal["temperature"] = 1.0
    fill: float | None = None

    @pydantic.model_validator(mode="after")
    def _one_or_the_other(self) -> "Rule":
        if (self.source is None) == (self.fill is None):
            raise ValueError("takes from, the name of their tensor, or fill, a number")
        if self.source is not None and (not self.source or not all(self.source)):
            raise ValueError("from names no tensor")
        if self.source is not None and self.layout is None:
            raise ValueError("has no layout, the axes of their tensor")
        for axis, text in self.part.items():
            found = _PART.fullmatch(text.strip())
            if not found or int(found[1]) >= int(found[2]):
                raise ValueError(f"part {axis}: takes N of M, N from 0 to M - 1, as in 0 of 3")
        return self

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Index and number of the parts of every axis of `part`."""
        pairs = {axis: text.split(" of ") for axis, text in self.part.items()}
        return {axis: (int(index), int(number)) for axis, (index, number) in pairs.items()}

    @property
    def axes(self) -> list[tuple[str, ...]]:
        """Names in each axis of theirs; none for an axis of size 1."""
        return _groups(self.layout or "")

    def problems(self, var: Var, sizes: Mapping[str, int]) -> list[str]:
        """Return what of this rule cannot be right for a parameter of this declaration."""
        if self.source is None:
            return []
        ours = var.dims[2:]
        try:
            named = [name for group in self.axes for name in group]
        except ValueError as error:
            return [str(error)]
        twice = sorted({name for name in named if named.count(name) > 1})
        problems = [f"layout {self.layout!r} has {name} twice" for name in twice]
        clash = [name for name in self.part if name in ours]
        problems += [f"part {name} is one of our axes; name theirs otherwise" for name in clash]
        problems += [
            f"sizes has {name}, which is no axis of ours in the layout"
            for name in self.sizes
            if name not in ours or name not in named
        ]
        by_source = {each: self._misfits(each, named, ours, sizes) for each in self.source}
        if all(by_source.values()):
            problems += next(iter(by_source.values()))
        return problems

    def fitting(self, var: Var, sizes: Mapping[str, int]) -> list[str]:
        """Return the names to try whose places and layout make the whole parameter."""
        named = [name for group in self.axes for name in group]
        return [
            source
            for source in self.source or ()
            if not self._misfits(source, named, var.dims[2:], sizes)
        ]

    def _misfits(
        self, source: str, named: list[str], ours: tuple[str, ...], sizes: Mapping[str, int]
    ) -> list[str]:
        """Return what of our axes is neither in the name of a tensor nor in its layout."""
        inside = placeholders(source)
        strange = [f"{{{name}}}" for name in inside if name not in ours]
        wanted = [name for name in ours if name not in inside]
        extra = [name for name in named if name not in (*wanted, *self.part)]
        lacking = [name for name in wanted if name not in named and sizes[name] != 1]
        lacking += [name for name in self.part if name not in named]
        problems = []
        if strange:
            problems.append(
                f"{', '.join(strange)} in {source!r} is none of our axes {', '.join(ours)}"
            )
        if extra or lacking:
            problems.append(
                f"layout {self.layout!r} of {source!r} names {', '.join(extra) or 'nothing'} too "
                f"many and {', '.join(lacking) or 'nothing'} too few; our axes there are "
                f"{', '.join(wanted) or 'none'}"
            )
        return problems


def placeholders(source: str) -> tuple[str, ...]:
    """Return the dims in braces in the name of a tensor of theirs, in order and each once."""
    return tuple(dict.fromkeys(_PLACEHOLDER.findall(source)))


def _groups(layout: str) -> list[tuple[str, ...]]:
    """Split a layout into the axes of theirs; raise ValueError for what is none."""
    groups: list[list[str]] = []
    inside = False
    for token in _TOKEN.findall(layout):
        if token == "(" and not inside:
            groups.append([])
            inside = True
        elif token == ")" and inside and groups[-1]:
            inside = False
        elif token == "1" and not inside:
            groups.append([])
        elif token.isidentifier():
            if inside:
                groups[-1].append(token)
            else:
                groups.append([token])
        else:
            raise ValueError(
                f"layout {layout!r} is none, at {token!r}; as in (head d_head) d_model"
            )
    if inside:
        raise ValueError(f"layout {layout!r} is none; as in (head d_head) d_model")
    return [tuple(group) for group in groups]


class WeightMapping(Config):
    """A rule for each of our parameters, and what of theirs is no parameter of ours.

    Attributes
    ----------
    name, description
        What it is called, and what it is of.
    parameters
        By our names.
    prefix
        Left out at the beginning of their names, where it is there.
    ignore
        Names, with `*` for anything, of tensors that are not read: buffers, masks.
    zero
        The same of tensors that our model has no place for and that must be 0, such as biases.
    """

    name: str = ""
    description: str = ""
    parameters: dict[str, Rule]
    prefix: str = ""
    ignore: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Return whether a tensor of theirs is left out."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def must_be_zero(self, name: str) -> bool:
        """Return whether a tensor of theirs that no rule reads may be dropped if it is 0."""
        return any(fnmatchcase(name, pattern) for pattern in self.zero)

    def settings(self) -> dict[str, Any]:
        """Return it as it is written in YAML, without what is not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


MappingLike: TypeAlias = str | Path | Mapping[str, Any] | WeightMapping


def mapping_names() -> tuple[str, ...]:
    """Return the names of the built-in mappings, sorted."""
    folder = files("mechicl.importers").joinpath(_FOLDER)
    found = (Path(str(entry)) for entry in folder.iterdir())
    return tuple(sorted([OURS, *(path.stem for path in found if path.suffix == ".yaml")]))


def mapping_text(name: str) -> str:
    """Return the YAML of a built-in mapping; raise InputError for `mechicl`, which has none."""
    if name == OURS:
        raise InputError(
            f"mapping {OURS!r} has no file: it is of every model, each parameter by our own name "
            "and with our own axes"
        )
    if name not in mapping_names():
        raise unknown("mapping", name, mapping_names())
    return files("mechicl.importers").joinpath(_FOLDER, f"{name}.yaml").read_text(encoding="utf-8")


def load_mapping(source: MappingLike, model: Model, task: Task) -> WeightMapping:
    """Return the mapping for this model: a rule for each parameter of it, and no other.

    Parameters
    ----------
    source
        Name of a built-in mapping, path of a YAML file, or its settings as a dict. `base` in it
        names a built-in one, over which its settings are set, rule by rule.

    Raises
    ------
    InputError
        For an unknown mapping or parameter, with near matches; for a rule that cannot be right, and
        for parameters without one: all of them at once.
    """
    declared, sizes = model.parameters(task), model.sizes(task)
    mapping = source if isinstance(source, WeightMapping) else _parsed(source, declared)
    where = f"mapping {mapping.name!r}" if mapping.name else "the mapping"
    problems = [
        f"{name}: {problem}"
        for name, rule in mapping.parameters.items()
        for problem in rule.problems(declared[name], sizes)
    ]
    missing = [name for name in declared if name not in mapping.parameters]
    if missing:
        problems.append(
            f"{', '.join(missing)} of model {model.name!r} {'has' if len(missing) == 1 else 'have'}"
            f" no rule; where theirs has no such parameter, say so: {missing[0]}: {{fill: 0}}"
        )
    if problems:
        raise InputError(f"{where}: " + "; ".join(problems))
    return mapping


def _parsed(source: Any, declared: Mapping[str, Var]) -> WeightMapping:
    """Return a mapping as given, over its base; rules of the base for other models are left out."""
    if source == OURS:
        return ours(declared)
    settings, name = _read(source)
    base: dict[str, Any] = {}
    if "base" in settings:
        wanted = settings.pop("base")
        if wanted == OURS:
            base = ours(declared).settings()
        else:
            base = parse_yaml(mapping_text(wanted), f"mapping {wanted!r}")
    elif isinstance(source, str) and source in mapping_names():
        base, settings = settings, {}
    rules = settings.get("parameters", {})
    if not isinstance(rules, Mapping) or not all(isinstance(r, Mapping) for r in rules.values()):
        raise InputError(f"mapping {name!r}: parameters are rules by our names, as in {_EXAMPLE}")
    for key in rules:
        if key not in declared:
            raise InputError(
                f"mapping {name!r}: {unknown('parameter of the model', key, declared)}"
            )
    merged = {k: dict(rule) for k, rule in base.get("parameters", {}).items() if k in declared}
    for key, rule in rules.items():
        replaces = "fill" in rule or "fill" in merged.get(key, {})
        merged[key] = dict(rule) if replaces else {**merged.get(key, {}), **rule}
    both = {
        key: [*base.get(key, ()), *_listed(settings.get(key, ()), name, key)]
        for key in ("ignore", "zero")
    }
    whole = {**base, "name": name, **settings, "parameters": merged, **both}
    try:
        return WeightMapping.model_validate(whole)
    except pydantic.ValidationError as error:
        settings_of = {*WeightMapping.model_fields, *Rule.model_fields}
        known = sorted({*settings_of, "base", "from"} - {"source"})
        raise invalid(f"mapping {name!r}", error, known=known) from None


def _listed(given: object, name: str, key: str) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        raise InputError(f"mapping {name!r}: {key} is a list of names; given {given!r}")
    return list(given)


def _read(source: Any) -> tuple[dict[str, Any], str]:
    """Return the settings of a mapping as they are written, and what it is called."""
    if isinstance(source, Mapping):
        return dict(source), str(source.get("name", ""))
    if not isinstance(source, (str, Path)):
        raise InputError(
            f"a mapping is a name, a path of YAML or a dict; given {type(source).__name__}"
        )
    path = expanded(source)
    if path.suffix in (".yaml", ".yml"):
        settings, name = read_yaml(path, "mapping"), path.stem
    else:
        name = str(source)
        settings = parse_yaml(mapping_text(name), f"mapping {name!r}")
    return settings, str(settings.get("name", name))


def ours(declared: Mapping[str, Var]) -> WeightMapping:
    """Return the mapping from our own names and axes, which `mechicl export` writes."""
    rules = {
        name: {"from": name, "layout": " ".join(var.dims[2:])} for name, var in declared.items()
    }
    text = "our own names and axes, as mechicl export writes them"
    return WeightMapping.model_validate({"name": OURS, "description": text, "parameters": rules})
