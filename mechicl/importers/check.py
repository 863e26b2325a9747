"""Whether what was imported is the same function: one forward pass of ours beside theirs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float32, Shaped
from torch import Tensor, nn

from mechicl.errors import InputError
from mechicl.importers.files import read_fields
from mechicl.models import Model
from mechicl.models.evaluate import evaluate
from mechicl.paths import expanded, path_text
from mechicl.tasks import Task

TOLERANCE = 1e-4
"""Largest difference of an output, over the standard deviation of theirs: float32 gives 1e-6."""

N_PROMPTS = 64
"""Prompts that a module is asked, and that are asked again with a parameter altered."""

OutputsLike: TypeAlias = str | Path | Mapping[str, Any]
Check: TypeAlias = nn.Module | Callable[[dict[str, Tensor], Tensor], Any]
Arrays: TypeAlias = Mapping[str, Float32[np.ndarray, "layer ..."]]


class Outputs(NamedTuple):
    """What their model gives at one checkpoint.

    Attributes
    ----------
    where
        What they are from, for messages.
    seed, step
        Which checkpoint; None where that is not said.
    inputs
        Prompts, as the task makes them.
    outputs
        Predictions as `Model.predict` has them, or all that the hooked model gives.
    """

    where: str
    seed: int | None
    step: int | None
    inputs: Shaped[np.ndarray, "batch ..."]
    outputs: Float32[np.ndarray, "batch ..."]


class Comparison(NamedTuple):
    """Theirs beside ours at one checkpoint.

    Attributes
    ----------
    error
        Largest absolute difference over the standard deviation of their outputs.
    untested
        Parameters that the outputs do not depend on, up to the tolerance.
    """

    seed: int
    step: int
    n_prompts: int
    error: float
    untested: frozenset[str]


def read_outputs(given: OutputsLike) -> list[Outputs]:
    """Return the outputs in a file (`.npz`, `.safetensors`, `.pt`), or in a mapping of arrays.

    It has `inputs` and `outputs`, and may have `step` and `seed`: a number each. Where `step` is a
    list, `outputs` has an axis of these steps before the batch, and the prompts are the same.

    Raises
    ------
    InputError
        For what cannot be read, lacks one of them, or is not finite.
    """
    where, fields = _fields(given)
    lacking = [name for name in ("inputs", "outputs") if name not in fields]
    if lacking:
        raise InputError(
            f"{where} has no {' and no '.join(lacking)}; it has {', '.join(fields) or 'nothing'}. "
            "It takes inputs and outputs, and step and seed"
        )
    inputs, outputs = fields["inputs"], fields["outputs"]
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        if not _are_floats(values):
            raise InputError(f"{where}: {name} are not finite numbers that float32 has")
    steps, seeds = fields.get("step"), fields.get("seed")
    if steps is None or steps.ndim == 0:
        return [
            Outputs(
                where, _label(where, "seed", seeds), _label(where, "step", steps), inputs, outputs
            )
        ]
    if steps.ndim != 1 or not steps.size or outputs.ndim < 2 or len(outputs) != steps.size:
        raise InputError(
            f"{where}: step is a number, or a list of as many as outputs has along its first axis, "
            f"one at least; given {steps.shape} and {outputs.shape}"
        )
    each = [seeds] * steps.size if seeds is None or seeds.ndim == 0 else list(seeds)
    if len(each) != steps.size:
        raise InputError(f"{where}: seed is a number, or a list as long as step")
    return [
        Outputs(where, _label(where, "seed", seed), _label(where, "step", step), inputs, theirs)
        for seed, step, theirs in zip(each, steps, outputs, strict=True)
    ]


def _fields(given: OutputsLike) -> tuple[str, dict[str, np.ndarray]]:
    if isinstance(given, Mapping):
        where = "the outputs"
        return where, {str(key): _array(value, f"{where}: {key}") for key, value in given.items()}
    path = expanded(path_text(given))
    if path.suffix != ".npz":
        fields = read_fields(path)
        return str(path), {name: _array(value, f"{path}: {name}") for name, value in fields.items()}
    try:
        with np.load(path, allow_pickle=False) as file:
            return str(path), {name: file[name] for name in file.files}
    except Exception as error:  # whatever NumPy and zipfile make of it
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise InputError(f"{path} cannot be read as .npz: {reason}") from None


def _array(value: Any, where: str) -> np.ndarray:
    """Return a tensor of any kind, or what NumPy makes of anything else; InputError for ragged."""
    try:
        if not isinstance(value, Tensor):
            return np.asarray(value)
        dense = value.detach().cpu().to_dense()
        is_of_numpy = dense.dtype in (torch.float32, torch.float64) or not dense.is_floating_point()
        return (dense if is_of_numpy else dense.float()).numpy()
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{where} is no array of numbers, but {type(value).__name__} "
            f"({' '.join(str(error).split())[:200]})"
        ) from None


def _are_floats(values: np.ndarray) -> bool:
    """Tell whether these are numbers, none of them NaN, infinite or too large for float32."""
    if values.dtype.kind not in "iuf":
        return False
    return bool((np.abs(values.astype(np.float64)) <= np.finfo(np.float32).max).all())


def _label(where: str, name: str, given: Any) -> int | None:
    if given is None:
        return None
    value = np.asarray(given)
    if value.size != 1 or value.dtype.kind not in "iuf" or float(value.item()) % 1:
        raise InputError(f"{where}: {name} is an integer; given {given!r}")
    return int(value.item())


class ForwardPass:
    """Our model on prompts, beside outputs of theirs.

    Parameters
    ----------
    tolerance
        See `TOLERANCE`.
    """

    def __init__(self, model: Model, task: Task, tolerance: float) -> None:
        self.model, self.task, self.tolerance = model, task, tolerance
        sample = task.sample(1, seed=0)
        self._input_shape = sample["inputs"].shape[1:]

    def compare(self, parameters: Arrays, given: Outputs, *, seed: int, step: int) -> Comparison:
        """Compare, and find which parameters the outputs do not depend on.

        Raises InputError for inputs that are none of the task, outputs of another shape than ours,
        and outputs that are all the same, which test nothing.
        """
        inputs = self._inputs(given)
        error = self.error(self.model, parameters, given)
        untested = frozenset()
        if error <= self.tolerance:
            untested = self._untested(parameters, inputs[:N_PROMPTS])
        return Comparison(seed, step, len(inputs), error, untested)

    def _untested(self, parameters: Arrays, inputs: np.ndarray) -> frozenset[str]:
        """Return the parameters that may be altered without a change of the predictions."""
        rng = np.random.default_rng(0)
        as_is = evaluate(self.model, self.task, parameters, inputs)
        limit = self.tolerance * float(as_is.std(dtype=np.float64))

        def change(name: str) -> float:
            altered = {**parameters, name: _altered(parameters[name], rng)}
            return float(np.abs(evaluate(self.model, self.task, altered, inputs) - as_is).max())

        return frozenset(name for name in parameters if change(name) <= limit)

    def of_predictions(self, given: Outputs, n: int) -> Outputs:
        """Return the predictions in outputs that are all that a model gives, of the first `n`."""
        few = given._replace(inputs=given.inputs[:n], outputs=given.outputs[:n])
        if self._are_predictions(few.outputs):
            return few
        answers = self.model.answers(self.task, torch.from_numpy(np.array(few.outputs)))
        return few._replace(outputs=answers.numpy())

    def _are_predictions(self, outputs: np.ndarray) -> bool:
        predictions = tuple(self.task.prediction_sizes.values())
        return outputs.shape[1:] in (predictions, (*predictions, 1))

    def error(self, model: Model, parameters: Arrays, given: Outputs) -> float:
        """Return the largest difference over the standard deviation of theirs; infinite for NaN."""
        ours = self._ours(parameters, given, len(given.inputs), model)
        spread = self._spread(given)
        if spread == 0:
            raise InputError(f"{given.where}: all outputs are the same, which tests nothing")
        difference = np.abs(ours - self._theirs(given, ours.shape)).max() / spread
        return float(difference) if np.isfinite(difference) else float("inf")

    def _spread(self, given: Outputs) -> float:
        return float(np.asarray(given.outputs, np.float64).std())

    def _ours(
        self, parameters: Arrays, given: Outputs, n: int, model: Model | None = None
    ) -> np.ndarray:
        """Return our predictions, or all that the hooked model gives, as `outputs` is shaped."""
        model = self.model if model is None else model
        inputs = self._inputs(given)[:n]
        if self._are_predictions(given.outputs):
            return evaluate(model, self.task, parameters, inputs)
        return self._whole(model, parameters, inputs)

    def _whole(self, model: Model, parameters: Arrays, inputs: np.ndarray) -> np.ndarray:
        weights = {name: torch.from_numpy(np.array(value)) for name, value in parameters.items()}
        prompts = torch.from_numpy(np.ascontiguousarray(inputs, self.task.input_dtype))
        with torch.no_grad():
            hooked = model.hooked(self.task, weights).eval()
            return hooked(model.windows(self.task, prompts)).numpy()

    def _theirs(self, given: Outputs, shape: tuple[int, ...]) -> np.ndarray:
        theirs = np.asarray(given.outputs, np.float64)
        if theirs.shape == (*shape, 1):
            theirs = theirs[..., 0]
        if theirs.shape != shape:
            predictions = (len(given.inputs), *self.task.prediction_sizes.values())
            raise InputError(
                f"{given.where}: outputs have shape {given.outputs.shape}; model "
                f"{self.model.name!r} predicts {predictions} for these inputs, and gives {shape} "
                "in all"
            )
        return theirs

    def _inputs(self, given: Outputs) -> np.ndarray:
        inputs = np.asarray(given.inputs)
        if inputs.shape[1:] != self._input_shape or not len(inputs):
            raise InputError(
                f"{given.where}: inputs have shape {inputs.shape}, and prompts of task "
                f"{self.task.name!r} (batch, {', '.join(map(str, self._input_shape))})"
            )
        if given.outputs.shape[:1] != inputs.shape[:1]:
            n = len(given.outputs) if given.outputs.ndim else "no batch, one number"
            raise InputError(f"{given.where}: {len(inputs)} inputs, and outputs of {n}")
        vocabulary = getattr(self.task, "d_vocab", None)
        if vocabulary is not None and (
            (inputs % 1 != 0).any() or inputs.min() < 0 or inputs.max() >= vocabulary
        ):
            raise InputError(
                f"{given.where}: inputs are token ids from 0 to {vocabulary - 1}; given "
                f"{inputs.min()} to {inputs.max()}"
            )
        return inputs.astype(self.task.input_dtype)


def _altered(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Put a parameter's numbers in another order; where they are all the same, add 1."""
    other = rng.permutation(values.reshape(-1)).reshape(values.shape)
    return values + 1 if (other == values).all() else other


class Asked:
    """Their model, asked what it gives at any checkpoint.

    Parameters
    ----------
    check
        A module, into which state dicts are loaded, or `(state dict, inputs) -> outputs`.
    """

    def __init__(self, check: Check, task: Task) -> None:
        if not callable(check) or isinstance(check, type):
            given = f"the class {check.__name__}, not one of it" if isinstance(check, type) else ""
            raise InputError(
                "check is a torch module, or a function of a state dict and inputs; given "
                f"{given or type(check).__name__}"
            )
        self._check = deepcopy(check).eval() if isinstance(check, nn.Module) else check
        prompts = task.sample(N_PROMPTS, seed=0)
        self._inputs = prompts["inputs"].values
        self.name = (
            type(check).__name__
            if isinstance(check, nn.Module)
            else getattr(check, "__name__", type(check).__name__)
        )

    def outputs(self, state: Mapping[str, Tensor], *, seed: int, step: int) -> Outputs:
        """Return what it gives with this state dict.

        Raises InputError where the state dict is not of that module, it fails on prompts of the
        task, or gives no finite tensor.
        """
        where, inputs = f"check {self.name!r} at seed {seed}, step {step}", self._inputs
        prompts = torch.from_numpy(np.array(inputs))
        with torch.no_grad():
            if isinstance(self._check, nn.Module):
                try:
                    self._check.load_state_dict(dict(state))
                except RuntimeError as error:
                    raise InputError(f"{where}: {' '.join(str(error).split())}") from None
            try:
                given = self._ask(state, prompts)
            except Exception as error:  # whatever code of theirs makes of it
                raise InputError(
                    f"{where} failed on prompts of shape {tuple(prompts.shape)}, "
                    f"{str(prompts.dtype).removeprefix('torch.')}: {type(error).__name__}: "
                    f"{' '.join(str(error).split())}"
                ) from error
        outputs = _array(given, f"what {where} gives")
        if not _are_floats(outputs):
            raise InputError(f"{where} gives no finite numbers, but {type(given).__name__}")
        return Outputs(f"check {self.name!r}", seed, step, inputs, outputs)

    def _ask(self, state: Mapping[str, Tensor], prompts: Tensor) -> Any:
        if isinstance(self._check, nn.Module):
            return self._check(prompts)
        return self._check(dict(state), prompts)


def chosen_steps(steps: Sequence[int]) -> list[int]:
    """Return the first, the middle and the last: the steps at which a module is asked."""
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]})


def untested(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the parameters that no comparison depends on."""
    each = [comparison.untested for comparison in comparisons]
    return sorted(frozenset.intersection(*each)) if each else []
