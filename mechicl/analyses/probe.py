"""What a probe is: a pure function with declared inputs and outputs, and a record that checks them.

A probe reads a trajectory (parameters and constants of a run, `docs/dataset.md`) and returns a
Dataset. The function computes; the record around it checks what goes in and what comes out, states
units, and stamps provenance. `docs/add-a-probe.md` adds one in five steps.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pydantic
import xarray as xr

from mechicl.config import Config
from mechicl.errors import InputError, NothingToAnalyseError, invalid
from mechicl.registry import Registry
from mechicl.schema import Var, check, stamp
from mechicl.version import __version__

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import HookedTransformer

BUILTIN = (
    "activation_patching",
    "approximate_loss",
    "attention_spans",
    "circuits",
    "context_kl",
    "function_vector",
    "head_permutation",
    "head_roles",
    "homogeneous_kq",
    "key_patching",
    "learning_stages",
    "length_generalization",
    "loss_landscape",
    "mmse",
    "predictor_distance",
    "preconditioner",
    "routing",
    "sign_matching",
    "solution_manifold",
    "task_allocation",
    "training_stages",
    "value_alignment",
    "zero_sum_ov",
)
_PART_BYTES = 2**24  # of parameters read at once, where a probe goes step by step

_REGISTRY: "Registry[Probe]" = Registry(
    "probe", {name: f"mechicl.analyses.{name}" for name in BUILTIN}
)


class PromptSource(Protocol):
    """Type of `Forward.prompts`."""

    def __call__(
        self, n: int, seed: int, *, part: int = 0, n_context: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets."""
        ...


class SampleSource(Protocol):
    """Type of `Forward.sample`."""

    def __call__(self, n: int, seed: int, *, part: int = 0) -> xr.Dataset:
        """Return prompts with their latents."""
        ...


@dataclass(frozen=True)
class Against:
    """Another run of the same task, as it ended, that a comparative probe holds a run against.

    Attributes
    ----------
    seeds
        Its seeds.
    step
        Its last step, at which its models are taken.
    run_digest
        Which run it is.
    predict
        `inputs -> predictions`: (seed, batch, ...), of all its seeds.
    """

    seeds: np.ndarray
    step: int
    run_digest: str
    predict: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Forward:
    """What a forward probe may ask of a run besides its parameters; arrays are NumPy.

    Attributes
    ----------
    predict
        `(parameters, inputs) -> predictions`, the batched forward. `parameters` maps the names of
        all variables along seed and step to arrays with any leading axes `...`; `inputs` has a
        leading batch axis; the result is `(..., batch)`, and the axes of a prediction where the
        task gives it any (`Task.prediction_sizes`).
    prompts
        `(n, seed, *, part=0, n_context=None) -> (inputs, targets)`: a fixed evaluation set, a pure
        function of its arguments, apart from the data that the run trains on. Parts of one seed are
        independent; `n_context` asks for contexts of another length.
    references
        `inputs -> {name: predictions}`: the task's exact and classical predictors on those prompts,
        each shaped like a prediction, under names without blanks.
    load
        Reads the part of the trajectory that the probe chose into memory.
    attention
        `(parameters, inputs) -> patterns`, (..., layer, head, batch, query_pos, lag): attention
        weights by lag at the positions that the loss reads. Raises InputError for architectures
        without batched patterns.
    against
        The runs that this one is held against, by name; for comparative probes.
    hooked
        `parameters of one checkpoint -> HookedTransformer`, (layer, ...) by name and of their
        dtype: to intervene in, with `mechicl.models.interventions`.
    reads
        `(inputs, dtype=np.float32) -> tensor`: the sequences in which a hooked model reads prompts,
        windows of them where it has a `context`; token ids whatever `dtype` is.
    answers
        `output of a hooked model -> predictions`, as `predict` has them, (batch, ...); axes before
        that of the sequences stay.
    loss
        `(predictions, targets) -> loss` of each prompt, (..., batch).
    sample
        `(n, seed, *, part=0) -> Dataset`: the prompts that `prompts` gives for the same arguments,
        as `inputs` and `targets`, and what they are about and the model is not told: the latents
        of the task (`Task.sample`), such as `theta` and `leaf`.
    checkpoints
        `(steps, seeds) -> parameters`, read into memory: of the whole run, whichever steps and
        seeds the probe was given. Raises InputError for those that are not stored.
    """

    predict: Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray]
    prompts: PromptSource
    references: Callable[[np.ndarray], Mapping[str, np.ndarray]]
    load: Callable[[xr.Dataset], xr.Dataset] = xr.Dataset.compute
    attention: Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray] | None = None
    against: Mapping[str, Against] = field(default_factory=dict)
    hooked: "Callable[[Mapping[str, np.ndarray]], HookedTransformer] | None" = None
    reads: "Callable[..., Tensor] | None" = None
    answers: "Callable[[Tensor], np.ndarray] | None" = None
    loss: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    sample: SampleSource | None = None
    checkpoints: Callable[[Sequence[int], Sequence[int]], xr.Dataset] | None = None


def applies_always(trajectory: xr.Dataset) -> str | None:
    """Apply to every run that has the variables needed."""
    del trajectory
    return None


@dataclass(frozen=True)
class Probe:
    """A registered analysis.

    Attributes
    ----------
    compute
        `(trajectory, **parameters) -> Dataset`, or `(trajectory, forward, **parameters)` where
        `forward` is true. Pure: no I/O, no plotting, no change of its arguments.
    needs, gives
        Declarations of the variables read and returned. `holds`, `since` and `undefined` are added
        here.
    wants
        Declarations of variables that are read where a run has them: `applies` says which must be
        there together.
    statement
        What `holds` says yes or no to, in words; None where the probe only measures.
    undefined
        Reasons, as words joined by `_`, for which a result lacks values at a (seed, step).
        Where a code is not 0 some value is NaN, and where it is 0 none is. A reason may leave
        `holds` defined.
    headline
        The variables to look at first, (seed, step) or (seed, step, head): `analyze` prints them.
    applies
        `trajectory -> None`, or the reason why the probe says nothing about such a run.
    references
        Where the definitions come from: paper, equation.
    forward
        Whether the probe evaluates the model (see `Forward`); it then reads what it needs itself.
    by_step
        Whether a result at a step depends on that step alone: then a long trajectory is read and
        computed in parts, and memory is bounded by the result.
    comparative
        Whether the probe, a forward one, takes other runs of the same task (`Forward.against`).
    """

    name: str
    compute: Callable[..., xr.Dataset]
    needs: Mapping[str, Var]
    gives: Mapping[str, Var]
    statement: str | None
    undefined: tuple[str, ...]
    headline: tuple[str, ...]
    applies: Callable[[xr.Dataset], str | None]
    references: tuple[str, ...]
    forward: bool
    by_step: bool
    wants: Mapping[str, Var] = field(default_factory=dict)
    comparative: bool = False

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.compute) or "").partition("\n")[0]

    @property
    def reads(self) -> dict[str, Var]:
        """Every variable that is needed or wanted."""
        return {**self.needs, **self.wants}

    @cached_property
    def outputs(self) -> dict[str, Var]:
        """Every variable of a result, those that the record adds included."""
        outputs = dict(self.gives)
        if self.statement is not None:
            outputs["holds"] = Var(("seed", "step"), "1", self.statement, 0, 1)
            outputs["since"] = Var(
                ("seed",), "step", "first step from which it holds to the last (NaN: never)", 0
            )
        if self.undefined:
            flags = {0: "defined"} | {i: reason for i, reason in enumerate(self.undefined, start=1)}
            outputs["undefined"] = Var(("seed", "step"), "1", "why values are NaN", flags=flags)
        return outputs

    @cached_property
    def parameters(self) -> type[pydantic.BaseModel]:
        """The keyword-only parameters of `compute`, their annotations and defaults, as a model."""
        signature = inspect.signature(self.compute, eval_str=True)
        fields: dict[str, Any] = {
            name: (parameter.annotation, parameter.default)
            for name, parameter in signature.parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        return pydantic.create_model(f"{self.name}_parameters", __base__=Config, **fields)

    def resolve(self, settings: Mapping[str, object]) -> dict[str, Any]:
        """Return all parameters, defaults included, with `settings` checked and converted.

        Raises InputError naming every setting that is unknown, of a wrong type or out of range.
        """
        try:
            return self.parameters(**settings).model_dump()
        except pydantic.ValidationError as error:
            known = self.parameters.model_fields
            raise invalid(f"probe {self.name!r}", error, known=known) from None

    def objection(self, trajectory: xr.Dataset) -> str | None:
        """Return why this probe does not apply to `trajectory`, or None if it does."""
        missing = self._missing(trajectory)
        if missing:
            return f"the run has no {', '.join(missing)}{self._norms(trajectory)}"
        for name, var in self.reads.items():
            found = trajectory[name].dims if name in trajectory.variables else var.dims
            if set(found) != set(var.dims):
                return (
                    f"the run's {name} has axes {', '.join(map(str, found)) or 'none'}, and this "
                    f"probe reads one of axes {', '.join(var.dims) or 'none'}"
                )
        return self.applies(trajectory)

    def _norms(self, trajectory: xr.Dataset) -> str:
        """Say of a probe of weights that layer norms stand between these."""
        norms = [name for name in ("ln1_w", "ln2_w") if name in trajectory.variables]
        # What multiplies weights of queries and keys scales the product; to others they are models.
        if not norms or not {"W_Q", "score_scale"} <= set(self.needs):
            return ""
        return (
            f"; and its blocks have layer norms ({', '.join(norms)}), so that products of its "
            "weights are not the maps that this probe reads"
        )

    def _missing(self, trajectory: xr.Dataset) -> list[str]:
        return [name for name in self.needs if name not in trajectory.variables]

    def __call__(
        self, trajectory: xr.Dataset, forward: Forward | None = None, **settings: object
    ) -> xr.Dataset:
        """Run the probe: check the input, compute, state units and provenance, check the output.

        Raises InputError for wrong settings, SchemaError for data that do not fit the declarations,
        and NothingToAnalyseError, with the reason, for a run that the probe does not apply to.
        """
        return self.run(trajectory, settings, forward=forward)

    def run(
        self,
        trajectory: xr.Dataset,
        settings: Mapping[str, object],
        *,
        forward: Forward | None = None,
        load: Callable[[xr.Dataset], xr.Dataset] = xr.Dataset.compute,
    ) -> xr.Dataset:
        """Do what a call does, reading the trajectory with `load`, a part at a time."""
        parameters = self.resolve(settings)
        if not self._missing(trajectory):
            declared = {name: var for name, var in self.reads.items() if name in trajectory}
            check(trajectory, declared, where=f"input of probe {self.name!r}")
        reason = self.objection(trajectory)
        if reason is not None:
            raise NothingToAnalyseError(f"probe {self.name!r} does not apply: {reason}")
        if self.forward:
            if forward is None:
                raise InputError(f"probe {self.name!r} evaluates the model and needs a Forward")
            result = self.compute(trajectory, forward, **parameters)
        else:
            # A probe sees what it declares and nothing else.
            seen = trajectory[[name for name in self.reads if name in trajectory]]
            parts = _parts(seen) if self.by_step else [seen]
            result = _joined([self.compute(load(part), **parameters) for part in parts])
        if self.statement is not None:
            result["since"] = since(result["holds"])
        for name, var in self.outputs.items():
            if name in result and {*result[name].dims} == {*var.dims}:
                result[name] = result[name].transpose(*var.dims)
        result = stamp(result, self.outputs).drop_encoding()
        result.attrs = self._provenance(trajectory, parameters, result)
        if forward is not None and forward.against:
            digests = {name: other.run_digest for name, other in forward.against.items()}
            result.attrs["against"] = json.dumps(digests, sort_keys=True)
        check(result, self.outputs, where=f"output of probe {self.name!r}", ordered=True)
        return result

    def _provenance(
        self, trajectory: xr.Dataset, parameters: Mapping[str, Any], result: xr.Dataset
    ) -> dict[str, object]:
        attrs: dict[str, object] = {
            "probe": self.name,
            "parameters": json.dumps(parameters, sort_keys=True),
            "mechicl_version": __version__,
            "run_digest": trajectory.attrs.get("run_digest", ""),
            "references": "; ".join(self.references),
        }
        if self.statement is not None:
            attrs["statement"] = self.statement
        return attrs | self._counts(result)

    def _counts(self, result: xr.Dataset) -> dict[str, object]:
        """How often each reason applies in `result`, as an attribute."""
        if not self.undefined:
            return {}
        codes = result["undefined"].values
        counts = {
            reason: int((codes == code).sum())
            for code, reason in enumerate(self.undefined, start=1)
        }
        return {"n_undefined": json.dumps(counts, sort_keys=True)}

    def narrow(self, result: xr.Dataset, steps: Sequence[int]) -> xr.Dataset:
        """Return a result at some of its steps, its counts made anew; `since` stays as it is."""
        chosen = result.sel(step=list(steps))
        return chosen.assign_attrs(self._counts(chosen))


def probe(
    *,
    needs: Mapping[str, Var],
    gives: Mapping[str, Var],
    wants: Mapping[str, Var] | None = None,
    statement: str | None = None,
    undefined: tuple[str, ...] = (),
    headline: tuple[str, ...] = (),
    applies: Callable[[xr.Dataset], str | None] = applies_always,
    references: tuple[str, ...] = (),
    forward: bool = False,
    by_step: bool = True,
    comparative: bool = False,
) -> Callable[[Callable[..., xr.Dataset]], Probe]:
    """Register the decorated function as a probe under its own name; `Probe` has the arguments."""

    def register(compute: Callable[..., xr.Dataset]) -> Probe:
        record = Probe(
            name=compute.__name__,
            compute=compute,
            needs=needs,
            gives=gives,
            wants=wants or {},
            statement=statement,
            undefined=undefined,
            headline=headline,
            applies=applies,
            references=references,
            forward=forward,
            by_step=by_step,
            comparative=comparative,
        )
        return _REGISTRY.add(record.name, record, owner=compute.__module__)

    return register


def _parts(trajectory: xr.Dataset) -> list[xr.Dataset]:
    """Cut a trajectory along its steps into parts that memory holds many times over."""
    if "step" not in trajectory.dims:
        return [trajectory]
    steps = max(1, int(trajectory.sizes["step"] * _PART_BYTES / max(trajectory.nbytes, 1)))
    starts = range(0, trajectory.sizes["step"], steps)
    return [trajectory.isel(step=slice(start, start + steps)) for start in starts]


def _joined(parts: list[xr.Dataset]) -> xr.Dataset:
    if len(parts) == 1:
        return parts[0]
    return xr.concat(
        parts, "step", data_vars="minimal", coords="minimal", compat="override", join="exact"
    )


def get(name: str) -> Probe:
    """Return the probe called `name`; raise InputError with near matches if there is none."""
    return _REGISTRY.get(name)


def names() -> tuple[str, ...]:
    """Return the names of all probes, built-in and outside, sorted."""
    return _REGISTRY.names()


def comparative() -> tuple[str, ...]:
    """Return the names of the probes that take other runs, sorted."""
    return tuple(name for name in names() if get(name).comparative)


def since(holds: xr.DataArray) -> xr.DataArray:
    """Return the first step from which `holds` is 1 to the last step of each seed.

    Parameters
    ----------
    holds
        (..., step): 1 yes, 0 no, NaN undefined; NaN counts as not holding.

    Returns
    -------
    xr.DataArray
        (...), in steps; NaN where `holds` is not 1 at the last step.
    """
    ends_true = (holds == 1).isel(step=slice(None, None, -1)).cumprod("step")
    length = ends_true.sum("step").astype(int)
    steps = holds["step"].values.astype(float)
    first = np.append(steps[::-1], np.nan)[length.values - 1]
    return length.copy(data=np.where(length.values > 0, first, np.nan))


def undefined_codes(reasons: Mapping[str, xr.DataArray]) -> xr.DataArray:
    """Return 0 where no reason applies, else the 1-based number of the first that does.

    Parameters
    ----------
    reasons
        Boolean (seed, step) arrays by reason, in the order of the probe's `undefined`.
    """
    codes = xr.zeros_like(next(iter(reasons.values())), dtype=np.int8)
    for number, where in reversed(list(enumerate(reasons.values(), start=1))):
        codes = codes.where(~where, np.int8(number))
    return codes


def verdict(condition: xr.DataArray, *blocking: xr.DataArray) -> xr.DataArray:
    """Return 1 where `condition`, 0 where not, NaN where a reason is `blocking`; (seed, step)."""
    answer = condition.astype(float)
    for where in blocking:
        answer = answer.where(~where)
    return answer
