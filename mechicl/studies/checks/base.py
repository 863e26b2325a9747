"""What a check is: a function of runs that measures quantities, seed by seed."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pydantic

from mechicl.config import Config
from mechicl.errors import InputError, invalid
from mechicl.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from mechicl.run import Run

_MODULES = {
    "he2025_runs": ("allocation", "effective_learning_rate", "length_growth", "loss_curves"),
    "he2025_theory": (
        "approximation_gap",
        "debiased_limit",
        "descent_stages",
        "limiting_ratio",
        "linear_as_softmax",
        "on_manifold",
        "single_head_optimum",
    ),
    "probes": ("probe_holds", "probe_value"),
    "raj2026_runs": ("keys_patched", "losses_of_strategies", "workspace_transplanted"),
    "raj2026_theory": ("no_adaptivity", "tree_strategies"),
    "yuksel2026_runs": ("attention_stages", "dips_in_order", "stages_along"),
    "yuksel2026_theory": ("factorization_stages",),
}
_REGISTRY: "Registry[Check]" = Registry(
    "check",
    {
        name: f"mechicl.studies.checks.{module}"
        for module, registered in _MODULES.items()
        for name in registered
    },
)


@dataclass(frozen=True)
class Measurement:
    """One value of one quantity.

    Attributes
    ----------
    quantity
        What was measured; a claim has the published value under the same name.
    value
        NaN where it is undefined.
    error
        Standard error of `value`, where there is one.
    seed
        Seed of the model it is of; None for what has no seed.
    excluded
        Why this seed does not count, empty where it does: the claim is about models that reached
        some state, and this one did not. It is shown with the fraction.
    """

    quantity: str
    value: float
    error: float | None = None
    seed: int | None = None
    excluded: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes
    ----------
    measurements
        In the order in which they are shown.
    shown
        What the claim's figure is drawn from: a probe's result, or a Dataset for
        `mechicl.plots.curves`; None leaves it at published and measured values.
    """

    measurements: tuple[Measurement, ...]
    shown: "xr.Dataset | None" = None


@dataclass(frozen=True)
class Check:
    """A registered check.

    Attributes
    ----------
    compute
        `(runs, **parameters) -> Outcome`: `runs` are open runs by label. Pure but for reading them.
    """

    name: str
    compute: Callable[..., Outcome]
    parameters: type[pydantic.BaseModel] = field(repr=False)

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.compute) or "").partition("\n")[0]

    def resolve(self, settings: Mapping[str, object]) -> dict[str, Any]:
        """Return all parameters, defaults included; raise InputError for what does not fit."""
        try:
            given = self.parameters(**settings)
        except pydantic.ValidationError as error:
            known = self.parameters.model_fields
            raise invalid(f"check {self.name!r}", error, known=known) from None
        return {name: getattr(given, name) for name in self.parameters.model_fields}

    def __call__(self, runs: "Mapping[str, Run]", **settings: object) -> Outcome:
        """Measure; raise InputError for wrong settings, and for a check that measured nothing."""
        outcome = self.compute(runs, **self.resolve(settings))
        if not outcome.measurements:
            raise InputError(f"check {self.name!r} measured nothing; it was given runs {[*runs]}")
        return outcome


def check(compute: Callable[..., Outcome]) -> Check:
    """Register the decorated function under its own name; its keyword-only arguments are settings.

    See `Check` for what it takes and returns.
    """
    signature = inspect.signature(compute)
    fields: dict[str, Any] = {
        name: (
            parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    parameters = pydantic.create_model(f"{compute.__name__}_parameters", __base__=Config, **fields)
    record = Check(compute.__name__, compute, parameters)
    return _REGISTRY.add(record.name, record, owner=compute.__module__)


def require_labels(runs: "Mapping[str, Run]", *labels: str | None) -> None:
    """Refuse labels that no run has."""
    strange = [label for label in labels if label is not None and label not in runs]
    if strange:
        raise InputError(f"{', '.join(strange)} is none of the runs: {', '.join(runs)}")


def curves(
    curves: "Mapping[str, np.ndarray]",
    x: "np.ndarray",
    title: str,
    x_label: str,
    y_label: str,
    **scales: str,
) -> "xr.Dataset":
    """Return what `mechicl.plots.curves` draws: curves by name over `x`."""
    import numpy as np
    import xarray as xr

    return xr.Dataset(
        {"y": (("curve", "x"), np.stack(list(curves.values())))},
        coords={"curve": list(curves), "x": x},
        attrs={
            "figure": "curves",
            "title": title,
            "x_label": x_label,
            "y_label": y_label,
            **scales,
        },
    )


def get(name: str) -> Check:
    """Return the check called `name`; raise InputError with near matches if there is none."""
    return _REGISTRY.get(name)


def names() -> tuple[str, ...]:
    """Return the names of all checks, built-in and outside, sorted."""
    return _REGISTRY.names()
