"""From their state dict to our parameters, by a mapping; all that does not fit is said at once."""

import itertools
import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float32
from torch import Tensor

from mechicl.errors import InputError
from mechicl.importers.mapping import Rule, WeightMapping, placeholders
from mechicl.models import Model
from mechicl.tasks import Task

_NORM = re.compile(r"(^|[._])(ln|norm|layer_?norm|rms_?norm)(_?\d+|_?f|_final|_in|_out)?([._]|$)")
_NORM_OF_OURS = ("ln1_w",)
_SHOWN = 8


class Translated(NamedTuple):
    """What a state dict is to us.

    Attributes
    ----------
    parameters
        Ours, by name: (layer, ...), float32.
    dropped
        Names of theirs that were 0 and that our model has no place for.
    """

    parameters: dict[str, Float32[np.ndarray, "layer ..."]]
    dropped: tuple[str, ...]


class _Piece(NamedTuple):
    """One tensor of theirs, and the indices of ours (`layer`, ...) that it fills."""

    key: str
    at: dict[str, int]


class Translator:
    """Makes our parameters of state dicts that have the same names.

    Parameters
    ----------
    mapping
        As `load_mapping` returns it for this model and task.
    """

    def __init__(self, mapping: WeightMapping, model: Model, task: Task) -> None:
        self.mapping = mapping
        self._model = model
        self._declared = model.parameters(task)
        self._sizes = model.sizes(task)
        self._scales = {
            name: _scale(name, rule, task)
            for name, rule in mapping.parameters.items()
            if rule.source is not None
        }
        self._known: dict[frozenset[str], dict[str, list[_Piece]]] = {}

    def __call__(self, state: Mapping[str, Tensor], where: object) -> Translated:
        """Return our parameters; infinities and NaN are kept.

        Raises
        ------
        InputError
            That lists all that does not fit: names that are not there, or that nothing reads;
            shapes, types, numbers too large for float32; what our model has no place for.
        """
        if self.mapping.prefix:
            state = _without_prefix(state, self.mapping.prefix, where)
        names = frozenset(state)
        if names not in self._known:
            self._known[names] = self._resolved(names, state, where)
        problems, parameters = [], {}
        for name, pieces in self._known[names].items():
            try:
                parameters[name] = self._parameter(name, pieces, state)
            except InputError as error:
                problems.append(str(error))
        read = {piece.key for pieces in self._known[names].values() for piece in pieces}
        dropped, left = [], []
        for key in state:
            if key in read or self.mapping.ignores(key):
                continue
            (dropped if self.mapping.must_be_zero(key) else left).append(key)
        problems += self._nonzero([key for key in dropped if not _is_zero(state[key])])
        problems += self._unread(left, state)
        if problems:
            raise self._refusal(where, problems)
        return Translated(parameters, tuple(dropped))

    def _refusal(self, where: object, problems: list[str]) -> InputError:
        shown = problems[:_SHOWN]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        name = f"mapping {self.mapping.name!r}" if self.mapping.name else "the mapping"
        return InputError(
            f"{where} does not fit {name} and model {self._model.name!r}: " + "; ".join(shown)
        )

    # Names --------------------------------------------------------------------------------------

    def _resolved(
        self, names: frozenset[str], state: Mapping[str, Tensor], where: object
    ) -> dict[str, list[_Piece]]:
        """Return which tensors each parameter is made of; InputError lists what lacks."""
        found: dict[str, list[_Piece]] = {}
        problems: list[str] = []
        read: set[str] = set()
        for name in self._declared:
            rule = self.mapping.parameters[name]
            try:
                found[name] = self._pieces(name, rule, names)
                read |= {piece.key for piece in found[name]}
            except InputError as error:
                problems.append(str(error))
        if problems:
            left = [
                key
                for key in state
                if key not in read
                and not self.mapping.ignores(key)
                and not self.mapping.must_be_zero(key)
            ]
            raise self._refusal(where, problems + self._unread(left, state))
        return found

    def _pieces(self, name: str, rule: Rule, names: frozenset[str]) -> list[_Piece]:
        if rule.source is None:
            return []
        tried = []
        for source in rule.fitting(self._declared[name], self._sizes):
            dims = placeholders(source)
            pieces, lacking = [], []
            for index in itertools.product(*(range(self._sizes[dim]) for dim in dims)):
                at = dict(zip(dims, index, strict=True))
                wanted = source
                for dim, number in at.items():
                    wanted = wanted.replace(f"{{{dim}}}", str(number))
                matches = _matches(wanted, names)
                if len(matches) > 1:
                    raise InputError(
                        f"{name}: {wanted!r} is any of {', '.join(sorted(matches)[:4])}; name the "
                        "one that is meant"
                    )
                if matches:
                    pieces.append(_Piece(matches[0], at))
                else:
                    lacking.append(wanted)
            if not lacking:
                return pieces
            tried.append(lacking[0])
        near = get_close_matches(tried[-1].replace("*", ""), names, n=2, cutoff=0.7)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise InputError(f"{name}: there is no {' or '.join(map(repr, tried))}{hint}")

    def _unread(self, keys: list[str], state: Mapping[str, Tensor]) -> list[str]:
        """Say of each tensor of theirs that nothing reads what may be done about it."""
        has_norm = any(name in self._declared for name in _NORM_OF_OURS)
        norms = [key for key in keys if _NORM.search(key.lower())]
        rest = [key for key in keys if key not in norms]
        problems = []
        if norms and not has_norm:
            problems.append(
                f"{_some(norms)}: weights of a layer norm, which model {self._model.name!r} has "
                "not: with a norm in between it is another function, and is not imported"
            )
        elif norms:
            rest += norms
        nonzero = [
            key
            for key in rest
            if key.endswith("bias") and state[key].is_floating_point() and not _is_zero(state[key])
        ]
        problems += self._nonzero(nonzero)
        rest = [key for key in rest if key not in nonzero]
        if rest:
            problems.append(
                f"nothing reads {_some(rest)}; give a rule for it, or list it under `ignore` "
                "(buffers, masks) or `zero` (dropped where it is 0) in the mapping"
            )
        return problems

    def _nonzero(self, keys: list[str]) -> list[str]:
        if not keys:
            return []
        are = "is" if len(keys) == 1 else "are"
        return [
            f"{_some(keys)} {are} not 0, and model {self._model.name!r} has no parameter there: it "
            "cannot be the same function"
        ]

    # Numbers ------------------------------------------------------------------------------------

    def _parameter(
        self, name: str, pieces: list[_Piece], state: Mapping[str, Tensor]
    ) -> Float32[np.ndarray, "layer ..."]:
        dims = self._declared[name].dims[2:]
        rule = self.mapping.parameters[name]
        if rule.fill is not None:
            return np.full([self._sizes[dim] for dim in dims], rule.fill, np.float32)
        out = np.empty([self._sizes[dim] for dim in dims], np.float32)
        for piece in pieces:
            index = tuple(piece.at.get(dim, slice(None)) for dim in dims)
            inner = [dim for dim in dims if dim not in piece.at]
            values = as_float32(state[piece.key], f"{name}: {piece.key}")
            out[index] = self._laid_out(name, rule, values, inner, piece.key)
        return out

    def _laid_out(
        self, name: str, rule: Rule, values: np.ndarray, inner: list[str], key: str
    ) -> np.ndarray:
        """Return a tensor of theirs with our axes `inner`, those of size 1 included."""
        sizes = {dim: rule.sizes.get(dim, self._sizes[dim]) for dim in inner}
        sizes |= {axis: number for axis, (_, number) in rule.parts.items()}
        axes = rule.axes
        expected = tuple(math.prod(sizes[axis] for axis in group) for group in axes)
        if values.shape != expected:
            named = ", ".join(f"{axis} {sizes[axis]}" for group in axes for axis in group)
            raise InputError(
                f"{name}: {key} has shape {values.shape}, and the layout {rule.layout!r} of "
                f"{named} is {expected}"
            )
        present = [dim for dim in inner if any(dim in group for group in axes)]
        parts = list(rule.parts)
        left = " ".join(f"({' '.join(group)})" if group else "1" for group in axes)
        named = {axis: size for axis, size in sizes.items() if axis in (*present, *parts)}
        found = rearrange(values, f"{left} -> {' '.join([*parts, *present])}", **named)
        found = found[tuple(rule.parts[axis][0] for axis in parts)]
        with np.errstate(over="ignore"):
            scaled = (found.reshape([sizes[dim] for dim in inner]) * self._scales[name]).astype(
                np.float32
            )
        if (np.isinf(scaled) & np.isfinite(found.reshape(scaled.shape))).any():
            raise InputError(f"{name}: {key} times {self._scales[name]:g} overflows float32")
        if not rule.sizes:
            return scaled
        padded = np.zeros([self._sizes[dim] for dim in inner], np.float32)
        both = tuple(slice(min(sizes[dim], self._sizes[dim])) for dim in inner)
        padded[both] = scaled[both]
        return padded


def as_float32(tensor: Tensor, where: str) -> Float32[np.ndarray, "..."]:
    """Return a tensor of any floating type as float32; NaN and infinities are kept.

    Raises InputError for other types, sparse ones among them, and for finite numbers that float32
    has not.
    """
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        kind = tensor.dtype if tensor.layout == torch.strided else f"{tensor.layout} {tensor.dtype}"
        raise InputError(
            f"{where} is {str(kind).replace('torch.', '')}, and weights are dense floats"
        )
    if tensor.is_meta:
        raise InputError(f"{where} has no numbers: it was saved from the meta device")
    values = tensor.detach().to(torch.float32)
    # Of float types double alone has larger numbers, and not all of them have isfinite.
    if tensor.dtype == torch.float64 and bool((values.isinf() & tensor.isfinite()).any()):
        raise InputError(
            f"{where} has numbers of {float(tensor.abs().max()):.3g}, too large for float32"
        )
    return values.numpy()


def _is_zero(tensor: Tensor) -> bool:
    """Tell whether a tensor, of any layout, is 0 all over; one without numbers is not."""
    return not tensor.is_meta and not bool((tensor.to_dense() != 0).any())


def _scale(name: str, rule: Rule, task: Task) -> float:
    if rule.scale != "temperature":
        return float(rule.scale)
    temperature = getattr(task, "temperature", None)
    if temperature is None:
        raise InputError(f"{name}: scale is temperature, and task {task.name!r} has none")
    return float(temperature)


def _matches(wanted: str, names: frozenset[str]) -> list[str]:
    if "*" not in wanted:
        return [wanted] if wanted in names else []
    pattern = re.compile(".*".join(map(re.escape, wanted.split("*"))))
    return [name for name in names if pattern.fullmatch(name)]


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _without_prefix(state: Mapping[str, Tensor], prefix: str, where: object) -> dict[str, Tensor]:
    short = [(key.removeprefix(prefix), tensor) for key, tensor in state.items()]
    twice = sorted({name for name, _ in short if sum(name == other for other, _ in short) > 1})
    if twice:
        raise InputError(f"{where} has {', '.join(twice)} with and without the prefix {prefix!r}")
    return dict(short)
