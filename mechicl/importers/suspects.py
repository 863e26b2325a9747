"""What a mapping usually has wrong, tried in turn: which of it would give their outputs."""

import itertools
from collections.abc import Iterator, Mapping

from torch import Tensor

from mechicl.errors import InputError
from mechicl.importers.check import ForwardPass, Outputs
from mechicl.importers.mapping import Rule, WeightMapping
from mechicl.importers.translate import Translator
from mechicl.models import Model

_MOST = 3  # matches that are told
_PROMPTS = 16  # that each is tried on
_QKVO = ("W_Q", "W_K", "W_V", "W_O")
_GROUPS = (_QKVO, ("W_Q", "W_K", "W_V"), ("W_Q", "W_K"), ("W_V", "W_O"))


def suspects(
    mapping: WeightMapping, forward: ForwardPass, state: Mapping[str, Tensor], given: Outputs
) -> str:
    """Return in a sentence what would match, of what is usually wrong.

    Tried are axes the other way round where shapes allow it, heads interleaved, queries and keys
    exchanged, fused parts in another order or interleaved with heads, logits with and without the
    temperature, each with the usual factors on scores.
    """
    few = forward.of_predictions(given, _PROMPTS)
    matches = list(itertools.islice(_matching(mapping, forward, state, few), _MOST))
    if "" in matches:
        return "the predictions match, and what is given elsewhere does not"
    if matches:
        return "it would match with " + "; or with ".join(matches)
    return (
        "nothing that is usually wrong would make it match: axes the other way round, heads "
        "interleaved, queries and keys exchanged, parts of a fused matrix, the temperature, the "
        "factor on scores"
    )


def _matching(
    mapping: WeightMapping, forward: ForwardPass, state: Mapping[str, Tensor], given: Outputs
) -> Iterator[str]:
    for said, changed in [("", mapping), *_changed(mapping)]:
        try:
            parameters = Translator(changed, forward.model, forward.task)(state, given.where)[0]
            found = [
                (factor, model)
                for factor, model in _scaled(forward)
                if forward.error(model, parameters, given) <= forward.tolerance
            ]
        except (InputError, RuntimeError):  # of another shape
            continue
        for factor, _ in found[:1]:
            yield " and ".join(part for part in (said, factor) if part)


def _scaled(forward: ForwardPass) -> Iterator[tuple[str, Model]]:
    """Yield the model, and it with other factors on its scores; what is different in words."""
    model = forward.model
    yield "", model
    if "score_scale" not in type(model).model_fields:
        return
    sizes = model.sizes(forward.task)
    widths: dict[str, float] = {
        name: sizes[name] for name in ("d_head", "d_model", "d_key") if name in sizes
    }
    if "d_model" in widths:
        widths["(d_model - 1)"] = max(widths["d_model"] - 1, 1)
        widths["(d_model / heads)"] = widths["d_model"] / sizes["head"]
        widths["(heads d_model)"] = widths["d_model"] * sizes["head"]
    factors = {"1": 1.0} | {f"{name}^-1/2": width**-0.5 for name, width in widths.items()}
    for text, factor in factors.items():
        yield (
            f"score_scale {factor:.6g} ({text})",
            model.model_copy(update={"score_scale": factor}),
        )


def _changed(mapping: WeightMapping) -> Iterator[tuple[str, WeightMapping]]:
    rules = mapping.parameters
    alone = [(name,) for name in rules if rules[name].source is not None]
    groups = [tuple(n for n in group if n in rules) for group in _GROUPS] + alone
    for words, change in (
        ("axes the other way round", _reversed),
        ("heads interleaved", _interleaved),
        ("the parts of a fused matrix inside each head", _heads_first),
        ("the parts of a fused matrix around the heads", _parts_first),
    ):
        seen = set()
        for group in groups:
            changed = {name: change(rules[name]) for name in group}
            changed = {name: rule for name, rule in changed.items() if rule is not None}
            if not changed or tuple(changed) in seen:
                continue
            seen.add(tuple(changed))
            layouts = "; ".join(f"{name}: {rule.layout!r}" for name, rule in changed.items())
            yield f"{words} ({layouts})", _with(mapping, changed)
    logits = [name for name in ("W_U", "b_U") if name in rules and rules[name].source is not None]
    if logits:
        is_scaled = rules[logits[0]].scale == "temperature"
        scale = 1.0 if is_scaled else "temperature"
        scaled = {name: rules[name].model_copy(update={"scale": scale}) for name in logits}
        yield f"scale {scale} of {', '.join(logits)}", _with(mapping, scaled)
    if "W_Q" in rules and "W_K" in rules:
        swapped = {"W_Q": rules["W_K"], "W_K": rules["W_Q"]}
        yield "W_Q and W_K exchanged", _with(mapping, swapped)
    fused = [name for name in ("W_Q", "W_K", "W_V") if name in rules and rules[name].part]
    for order in itertools.permutations(fused):
        if len(fused) == 3 and list(order) not in (fused, [fused[1], fused[0], fused[2]]):
            parts = {name: rules[other] for name, other in zip(fused, order, strict=True)}
            yield f"the parts in the order {', '.join(order)}", _with(mapping, parts)


def _with(mapping: WeightMapping, rules: Mapping[str, Rule]) -> WeightMapping:
    return mapping.model_copy(update={"parameters": {**mapping.parameters, **rules}})


def _relaid(rule: Rule, axes: list[tuple[str, ...]]) -> Rule | None:
    layout = " ".join(_written(group) for group in axes)
    return None if axes == rule.axes else rule.model_copy(update={"layout": layout})


def _written(group: tuple[str, ...]) -> str:
    if len(group) == 1:
        return group[0]
    return f"({' '.join(group)})" if group else "1"


def _reversed(rule: Rule) -> Rule | None:
    """Exchange the last two axes of theirs."""
    if rule.source is None or len(rule.axes) < 2:
        return None
    *rest, first, second = rule.axes
    return _relaid(rule, [*rest, second, first])


def _interleaved(rule: Rule) -> Rule | None:
    """Exchange `head d_head` where they share an axis."""
    if rule.source is None:
        return None
    swap = {"head": "d_head", "d_head": "head"}
    axes = [
        tuple(swap.get(name, name) for name in group) if {"head", "d_head"} <= {*group} else group
        for group in rule.axes
    ]
    return _relaid(rule, axes)


def _heads_first(rule: Rule) -> Rule | None:
    """Put the part of a fused matrix inside each head: (qkv head d_head) as (head qkv d_head)."""
    if rule.source is None or not rule.part:
        return None
    axes = [
        ("head", *(name for name in group if name != "head")) if "head" in group else group
        for group in rule.axes
    ]
    return _relaid(rule, axes)


def _parts_first(rule: Rule) -> Rule | None:
    """Put the part of a fused matrix before the heads: (head qkv d_head) as (qkv head d_head)."""
    if rule.source is None or not rule.part:
        return None
    axes = [
        (*(n for n in group if n in rule.part), *(n for n in group if n not in rule.part))
        for group in rule.axes
    ]
    return _relaid(rule, axes)
