"""Interventions: a hooked model run with what passes some of its hook points replaced.

They work on any HookedTransformer, whatever its layers are made of: a patch sees the name of a hook
point and a tensor whose first axis is the batch. `docs/patching.md` shows them in use.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from transformer_lens import HookedTransformer

from mechicl.errors import InputError, integer, unknown
from mechicl.models.hooked import hook_dims

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

SEQUENCES_AT_ONCE = 4096
"""Sequences that `run_each` gives to one forward pass, unless one variant alone has more."""

_ROUNDINGS = 64
"""Units in the last place of the largest entry by which what is unchanged may differ."""

Place: TypeAlias = int | slice | Sequence[int]


@dataclass(frozen=True, eq=False)
class Donor:
    """Another activation: what passes a hook point of a model that reads other sequences.

    It is recorded, and detached, with the hooks that the model has when the patch is put in.

    Attributes
    ----------
    inputs
        What the donor reads: as many sequences as are patched, or one for all of them; any number
        where `mean` is set.
    model
        The donor; None is the model that is patched.
    hook
        Its hook point; None is the one that is patched.
    mean
        Whether to give the mean over its sequences, to each that is patched.
    """

    inputs: Shaped[Tensor, "sequence ..."]
    model: HookedTransformer | None = None
    hook: str | None = None
    mean: bool = False


@dataclass(frozen=True, eq=False)
class Patch:
    """What replaces an activation, and where.

    Attributes
    ----------
    hook
        Name of the hook point, such as `blocks.0.attn.hook_z`.
    value
        A tensor of the shape of what passes there, or with a batch of 1, whatever `at` is: it is
        read at the same place that it is written to. Or a `Donor`; or `"zero"`; or `"mean"`, the
        mean over the batch that passes.
    at
        Indices by dim, as `mechicl.models.hooked.hook_dims` names them, such as
        `{"head": 0, "pos": [3, -1]}`: an integer, a slice, or several integers. The patch acts
        where all of them are met; dims that are left out are met everywhere.
    """

    hook: str
    value: Float[Tensor, "sequence ..."] | Donor | Literal["zero", "mean"]
    at: Mapping[str, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = isinstance(self.value, str) and self.value in ("zero", "mean")
        if not named and not isinstance(self.value, (Tensor, Donor)):
            raise InputError(
                f"the value of a patch is a tensor, a Donor, 'zero' or 'mean'; given {self.value!r}"
            )
        if not self.at:
            return
        dims = hook_dims(self.hook)
        for dim in self.at:
            if dim not in dims:
                raise unknown(f"dim of {self.hook}", dim, dims)


Unchanged: TypeAlias = Literal["warn", "ignore"]


@contextmanager
def patched(
    model: HookedTransformer, patches: Patch | Iterable[Patch], *, unchanged: Unchanged = "warn"
) -> Iterator[HookedTransformer]:
    """Patch a model within a `with` block; every forward pass in it is patched.

    Hooks of your own stay, and run in the order in which they were added: those that were there
    before the block run first, so that a patch has the last word on what passes; those added within
    it, as by `run_with_cache`, see what is patched. Patches of one hook point act in the order
    given. Blocks may be nested. However the block ends, none of its hooks is left.

    Parameters
    ----------
    model
        Any HookedTransformer.
    patches
        One or several, all at once.
    unchanged
        What to do about a patch that changed no entry of any activation by more than rounding: a
        UserWarning, or nothing.

    Raises
    ------
    InputError
        Before anything runs, for a hook point that the model, or a donor, has not (with near
        matches). In a forward pass, for a value whose shape does not fit, saying what does, and for
        a place outside the activation. At the end of the block, for a hook point that never fired.
    """
    _require_known(unchanged)
    given = _several(patches)
    with _installed(model, [given], _record_donors(model, [given])) as edits:
        yield model
    _report(edits, unchanged, stacklevel=4)


def run_patched(
    model: HookedTransformer,
    inputs: Shaped[Tensor, "sequence ..."],
    patches: Patch | Iterable[Patch],
    *,
    unchanged: Unchanged = "warn",
) -> Float[Tensor, "sequence ..."]:
    """Return what the model gives for `inputs` under patches; `patched` says how, and raises."""
    _require_known(unchanged)
    given = _several(patches)
    with _installed(model, [given], _record_donors(model, [given])) as edits:
        output = model(inputs)
    _report(edits, unchanged, stacklevel=3)
    return output


def run_each(
    model: HookedTransformer,
    inputs: Shaped[Tensor, "sequence ..."],
    variants: Sequence[Patch | Sequence[Patch]],
    *,
    at_once: int = SEQUENCES_AT_ONCE,
    unchanged: Unchanged = "warn",
) -> Float[Tensor, "variant sequence ..."]:
    """Run the model under each of many variants, such as a patch a head; without gradient.

    Variants are stacked along the batch, so that one forward pass does as many as have room. The
    result is that of `run_patched` for one after another, to rounding; a donor that variants share
    is recorded once.

    Parameters
    ----------
    variants
        Patches, or lists of patches that act together.
    at_once
        Most sequences in one pass; a variant is never cut.

    Returns
    -------
    Tensor
        What the model returns for each variant.

    Raises
    ------
    InputError
        As `patched` does, and for no variants at all.
    """
    integer("at_once", at_once, 1)
    groups = [_several(each) for each in variants]
    if not groups:
        raise InputError("no variants were given; run_each takes patches, or lists of them")
    _require_known(unchanged)
    outputs: list[Tensor] = []
    edits: list[_Edit] = []
    n_sequences = len(inputs)
    together = max(1, at_once // max(n_sequences, 1))
    with torch.no_grad():
        donors = _record_donors(model, groups)
        for start in range(0, len(groups), together):
            some = groups[start : start + together]
            stacked = inputs if len(some) == 1 else torch.cat([inputs] * len(some))
            with _installed(model, some, donors, n_sequences) as installed:
                output = model(stacked)
            outputs.append(output.unflatten(0, (len(some), n_sequences)))
            edits += installed
    _report(edits, unchanged, stacklevel=3)
    return torch.cat(outputs)


def record(
    model: HookedTransformer, inputs: Shaped[Tensor, "sequence ..."], names: Iterable[str]
) -> dict[str, Tensor]:
    """Return copies of what passes hook points, detached; hooks of your own stay.

    Raises InputError for a hook point that the model has not, or that does not fire.
    """
    found: dict[str, Tensor] = {}
    handles: list[RemovableHandle] = []
    wanted = list(dict.fromkeys(names))
    _require(model, wanted)
    try:
        for name in wanted:

            def keep(module: object, args: object, value: Tensor, name: str = name) -> None:
                found[name] = value.detach().clone()

            handles.append(model.hook_dict[name].register_forward_hook(keep))
        # Not without gradient where the caller is with it: rounding would differ in the last bit.
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name in wanted if name not in found]
    if silent:
        raise InputError(f"hook points {silent} do not fire in this model's forward pass")
    return found


def _several(patches: object) -> list[Patch]:
    """Return patches, one or several, as a list; raise InputError for anything else."""
    found: list[Any] = list(patches) if isinstance(patches, Iterable) else [patches]
    strange = [each for each in found if not isinstance(each, Patch)]
    if strange:
        raise InputError(
            f"given {strange[0]!r}; accepted: a Patch, or several, such as Patch(hook, 'zero')"
        )
    return found


def _require(model: HookedTransformer, names: Iterable[str]) -> None:
    for name in names:
        if name not in model.hook_dict:
            raise unknown("hook point", name, model.hook_dict)


def _require_known(unchanged: object) -> None:
    if unchanged not in ("warn", "ignore"):
        raise InputError(f"unchanged is 'warn' or 'ignore'; given {unchanged!r}")


@contextmanager
def _installed(
    model: HookedTransformer,
    groups: Sequence[Sequence[Patch]],
    donors: "Mapping[Donor, Mapping[str, Tensor]]",
    n_sequences: int | None = None,
) -> "Iterator[list[_Edit]]":
    """Put in the patches of several variants, which are stacked along the batch, into a model.

    Each variant has `n_sequences`. Yields what the patches do; it is known at the end.
    """
    _require(model, (patch.hook for group in groups for patch in group))
    points: dict[str, _Point] = {}
    for number, group in enumerate(groups):
        for patch in group:
            new = _Point(patch.hook, len(groups), n_sequences)
            points.setdefault(patch.hook, new).add(number, patch, donors)
    handles: list[RemovableHandle] = []
    try:
        # PyTorch's own hooks: what TransformerLens resets are those that were added through it.
        for name, point in points.items():
            handles.append(model.hook_dict[name].register_forward_hook(point))
        yield [edit for point in points.values() for edit in point.edits]
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name, point in points.items() if not point.fired]
    if silent:
        raise InputError(
            f"hook points {silent} never fired: no forward pass went through them, so that nothing "
            "was patched there"
        )


def _report(edits: "Sequence[_Edit]", unchanged: Unchanged, *, stacklevel: int) -> None:
    """Warn of patches that changed nothing."""
    idle = [edit.patch for edit in edits if not edit.changed]
    if idle and unchanged == "warn":
        names = list(dict.fromkeys(_named(patch) for patch in idle))
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        warnings.warn(
            f"{len(idle)} of {len(edits)} patches changed nothing: what they put in is what was "
            f"there ({'; '.join(names[:5])}{more})",
            UserWarning,
            stacklevel=stacklevel,
        )


def _named(patch: Patch) -> str:
    at = ", ".join(f"{dim} {place}" for dim, place in patch.at.items())
    return f"{patch.hook} at {at}" if at else patch.hook


def _record_donors(
    model: HookedTransformer, groups: Iterable[Iterable[Patch]]
) -> dict[Donor, Mapping[str, Tensor]]:
    """Return by donor what passes the hook points that are asked of it, a pass for each input."""
    asked: dict[tuple[int, int], dict[str, None]] = {}
    donors: dict[Donor, tuple[HookedTransformer, tuple[int, int]]] = {}
    for patch in (patch for group in groups for patch in group):
        donor = patch.value
        if isinstance(donor, Donor):
            of = model if donor.model is None else donor.model
            key = (id(of), id(donor.inputs))
            _require(of, [donor.hook or patch.hook])
            asked.setdefault(key, {})[donor.hook or patch.hook] = None
            donors[donor] = of, key
    passed: dict[tuple[int, int], dict[str, Tensor]] = {}
    for donor, (of, key) in donors.items():
        if key not in passed:
            passed[key] = record(of, donor.inputs, asked[key])
    return {donor: passed[key] for donor, (_, key) in donors.items()}


class _Edit:
    """A patch of one variant, with its value at hand, and whether it has changed anything."""

    def __init__(self, variant: int, patch: Patch, value: Tensor | Literal["zero", "mean"]) -> None:
        self.variant, self.patch, self.value = variant, patch, value
        self.changed = False

    def __call__(self, activation: Float[Tensor, "sequence ..."]) -> Tensor:
        """Return the activation patched; a tensor of its own."""
        value = self._fitting(activation)
        where = self._where(activation)
        out = _laid_out(
            value if where is None else torch.where(where, value, activation), activation
        )
        self.changed = self.changed or _differ(out.detach(), activation.detach())
        return out

    def _fitting(self, activation: Tensor) -> Tensor:
        if isinstance(self.value, str):
            if self.value == "zero":
                return torch.zeros_like(activation)
            return activation.mean(0, keepdim=True).expand_as(activation)
        given, passing = tuple(self.value.shape), tuple(activation.shape)
        if given[1:] != passing[1:] or given[:1] not in ((1,), passing[:1]):
            fits = "" if passing[0] == 1 else f", or {(1, *passing[1:])} for all sequences alike"
            raise InputError(
                f"patch of {_named(self.patch)}: given a value of shape {given}; what passes there "
                f"has shape {passing}, and that fits{fits}"
            )
        return self.value.to(activation).expand_as(activation)

    def _where(self, activation: Tensor) -> Tensor | None:
        """Return where the patch acts, of a shape that broadcasts; None is everywhere."""
        if not self.patch.at:
            return None
        dims = hook_dims(self.patch.hook)
        if len(dims) != activation.ndim:
            raise InputError(
                f"{self.patch.hook!r} is known by dims {dims}, and what passes there has shape "
                f"{tuple(activation.shape)}; leave `at` out"
            )
        where = torch.ones((), dtype=torch.bool, device=activation.device)
        for dim, place in self.patch.at.items():
            axis = dims.index(dim)
            size = activation.shape[axis]
            chosen = torch.zeros(size, dtype=torch.bool, device=activation.device)
            try:
                chosen[_as_index(place)] = True
            except (IndexError, TypeError):
                raise InputError(
                    f"patch of {self.patch.hook}: {dim} is an index from {-size} to {size - 1}, "
                    f"a slice, or several; given {place!r}"
                ) from None
            where = where & chosen.reshape([-1 if each == axis else 1 for each in range(len(dims))])
        return where


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    """Return a copy of a value in the memory order of another tensor.

    What follows may round otherwise in another order, and an unchanged activation would not do.
    """
    return torch.empty_like(like).copy_(value)


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors differ by more than rounding of the largest entry.

    A pass of more sequences may round otherwise than the one in which a donor was recorded.
    """
    if torch.equal(one, other):
        return False
    finite = torch.cat([each[each.isfinite()].abs().flatten() for each in (one, other)])
    if not finite.numel() or not one.is_floating_point():
        return True
    slack = _ROUNDINGS * torch.finfo(one.dtype).eps * float(finite.max())
    return not torch.isclose(one, other, rtol=0.0, atol=slack).all()


def _as_index(place: Any) -> slice | list[int]:
    if isinstance(place, slice):
        return place
    several = list(place) if isinstance(place, Iterable) else [place]
    if any(getattr(each, "dtype", type(each)) in (bool, torch.bool) for each in several):
        raise TypeError("a mask, of which 1 and 0 would be read as indices")
    return [index(each) for each in several]


class _Point:
    """The forward hook of one hook point: edits what passes, each variant its own part of it."""

    def __init__(self, name: str, n_variants: int, n_sequences: int | None) -> None:
        self.name, self.n_variants, self.n_sequences = name, n_variants, n_sequences
        self.edits: list[_Edit] = []
        self.fired = False

    def add(self, variant: int, patch: Patch, donors: Mapping[Donor, Mapping[str, Tensor]]) -> None:
        """Take in a patch of one variant."""
        value = patch.value
        if isinstance(value, Donor):
            recorded = donors[value][value.hook or patch.hook]
            value = recorded.mean(0, keepdim=True) if value.mean else recorded
        self.edits.append(_Edit(variant, patch, value))

    def __call__(self, module: object, args: object, activation: Tensor) -> Tensor:
        """Return what passes on."""
        self.fired = True
        if self.n_variants == 1:
            for edit in self.edits:
                activation = edit(activation)
            return activation
        n = self.n_sequences or 1
        if len(activation) == 1:  # passes once for the whole batch, which holds more from here on
            parts = [activation] * self.n_variants
        elif len(activation) == n * self.n_variants:
            parts = list(activation.split(n))
        else:
            raise InputError(
                f"{self.name!r} passes shape {tuple(activation.shape)}, whose first axis is not "
                f"the {n} sequences of {self.n_variants} variants: patch one at a time, by "
                "run_patched"
            )
        for edit in self.edits:
            parts[edit.variant] = edit(parts[edit.variant])
        stacked = torch.cat([part.expand(n, *part.shape[1:]) for part in parts])
        return stacked if len(activation) == 1 else _laid_out(stacked, activation)
