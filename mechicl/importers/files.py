"""Reading a file of weights that others wrote, without running anything that is in it."""

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mechicl.errors import InputError

WRAPPERS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "weights")
"""Fields in which training loops keep a state dict beside the step and the optimiser."""

_BLOCK = 2**20
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_WRAPPED = ("module.", "_orig_mod.")


def read_state(path: Path, key: str | None = None) -> dict[str, Tensor]:
    """Return the state dict in a file: a tensor a name, `module.` and `_orig_mod.` left out.

    Parameters
    ----------
    path
        A safetensors file, or one of `torch.save`.
    key
        Where in the file it is, dotted, such as `trainer.model`; None: it is the whole file, or in
        one of the `WRAPPERS`.

    Raises
    ------
    InputError
        For what is no such file, or is cut short; for a pickle with more in it than tensors and
        plain values, saying what its owner can do; and where there is no state dict, or several.
    """
    return _plain_names(_found(read_fields(path), path, key), path)


def read_fields(path: Path) -> dict[str, Any]:
    """Return all that is in a file; of safetensors, its tensors. Raises as `read_state`."""
    return _read_safetensors(path) if _is_safetensors(path) else _read_torch(path)


def read_step(path: Path, field: str) -> Any:
    """Return the step that a file says it is of.

    Parameters
    ----------
    field
        Its name, dotted; of safetensors, in the metadata of the file.

    Raises
    ------
    InputError
        As `read_state`, and where there is no such field.
    """
    if _is_safetensors(path):
        try:
            with safe_open(path, framework="pt") as file:
                fields: Mapping[str, Any] = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise _broken(path, error) from None
        found = fields.get(field)
        if isinstance(found, str) and re.fullmatch(r"-?\d+", found):
            return int(found)
    else:
        fields = _read_torch(path)
        found = _inside(fields, field)
    if found is None:
        known = ", ".join(map(str, fields)) or "none"
        raise InputError(f"{path} has no field {field!r} for the step; its fields: {known}")
    return found.item() if isinstance(found, Tensor) and found.numel() == 1 else found


def _is_safetensors(path: Path) -> bool:
    """Tell by the contents, for `.bin` and `.pt` may be either; raise InputError for neither."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if not head:
        raise InputError(f"{path} is empty: it is no checkpoint")
    if path.suffix == ".safetensors":
        return True
    # First, for the length of a header may begin like a pickle; no pickle is as long as this says.
    if len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < size:
        return True
    if head.startswith((_ZIP, _PICKLE)):
        return False
    raise InputError(
        f"{path} is not a checkpoint: it is neither a safetensors file nor one of torch.save"
    )


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from None


def _read_torch(path: Path) -> dict[str, Any]:
    import pickle

    _require_unaltered(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats, which it reads all the same
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _unsafe(path, error) from None
    except Exception as error:  # whatever torch makes of a file that was cut short
        if "TorchScript" in str(error):
            raise InputError(
                f"{path} is a TorchScript program, not weights; save the weights of it: "
                'torch.save(torch.jit.load(path).state_dict(), "step-N.pt")'
            ) from None
        raise _broken(path, error) from None
    if not isinstance(found, Mapping):
        raise InputError(f"{path} holds a {type(found).__name__}, not a state dict")
    return dict(found)


def _require_unaltered(path: Path) -> None:
    """Check the sums of an archive of `torch.save`, at which `torch.load` does not look.

    0 stands where it was told to write none.
    """
    if not zipfile.is_zipfile(path):
        return  # of the old format, or cut short, which torch tells
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.CRC:
                    with archive.open(member) as file:
                        while file.read(_BLOCK):
                            pass
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _broken(path, error) from None


def _unsafe(path: Path, error: Exception) -> InputError:
    reason = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    names = dict.fromkeys(_GLOBAL.findall(reason))
    if not names and "Unsupported" not in reason:
        return _broken(path, reason)
    what = f" ({', '.join(names)})" if names else ""
    arrays = " (NumPy arrays and numbers in it as tensors)" if "numpy" in what else ""
    return InputError(
        f"{path} is a pickle with more in it than tensors and plain values{what}: opening it could "
        "run whatever code is in it, so mechicl does not. Where you trust it, with the code that "
        "wrote it, save the weights alone: torch.save(model.state_dict(), ...) or "
        f"safetensors.torch.save_file(model.state_dict(), ...){arrays}, and import those"
    )


def _broken(path: Path, error: object) -> InputError:
    reason = re.split(r"\n|\. ", str(error).strip())[0][:200] or type(error).__name__
    return InputError(
        f"{path} cannot be read: it is cut short, altered, or no checkpoint ({reason})"
    )


def _inside(fields: Any, dotted: str) -> Any:
    """Return the field of that dotted name, None where there is none; a field may have dots."""
    if isinstance(fields, Mapping) and dotted in fields:
        return fields[dotted]
    for part in dotted.split("."):
        if not isinstance(fields, Mapping) or part not in fields:
            return None
        fields = fields[part]
    return fields


def _found(fields: dict[str, Any], path: Path, key: str | None) -> dict[str, Tensor]:
    """Return the state dict among the fields of a file."""
    if key is not None:
        found = _inside(fields, key)
        tensors = _tensors(found)
        if not tensors:
            known = ", ".join(map(str, list(fields)[:10])) or "none"
            raise InputError(f"{path} has no state dict at {key!r}; its fields: {known}")
        return tensors
    inside = {
        name: value
        for name, value in fields.items()
        if name in WRAPPERS and isinstance(value, Mapping)
    }
    inner = {name: _tensors(value) for name, value in inside.items()}
    inner = {name: value for name, value in inner.items() if value}
    if len(inner) > 1:
        raise InputError(f"{path} has several state dicts: {', '.join(inner)}; --key says which")
    if inner:
        return next(iter(inner.values()))
    if inside and not _tensors(fields):  # one more layer, as {"model": {"state_dict": ...}}
        value = next(iter(inside.values()))
        return _found({str(k): v for k, v in value.items()}, path, None)
    tensors = _tensors(fields)
    if not tensors:
        known = ", ".join(map(str, list(fields)[:10])) or "none"
        raise InputError(f"{path} has no state dict; its fields: {known}. --key A.B says where")
    return tensors


def _tensors(found: Any) -> dict[str, Tensor]:
    """Return the tensors of a mapping; what else there is, such as the step, is left out."""
    if not isinstance(found, Mapping):
        return {}
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def _plain_names(state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Leave out what DataParallel and torch.compile put before names, however often."""
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        short = name
        while short.startswith(_WRAPPED):
            short = short.partition(".")[2]
        short = short.replace("._orig_mod.", ".")
        if short in plain:
            raise InputError(
                f"{path} has {short!r} twice, as {name!r} and without a prefix; --key says which "
                "part of the file is meant"
            )
        plain[short] = tensor
    return plain
