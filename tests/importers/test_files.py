"""Files of weights: both formats, wrapped dicts, prefixes, and what is refused in a sentence."""

import argparse
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mechicl.errors import InputError
from mechicl.importers.files import read_state, read_step
from mechicl.importers.translate import as_float32

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2)}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == STATE.keys() and all((found[k] == STATE[k]).all() for k in STATE)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (STATE, None),
        ({"model": STATE, "step": 5}, None),
        ({"state_dict": STATE, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, None),
        ({"model_state_dict": STATE, "loss": 0.1}, None),
        ({"model": {"state_dict": STATE}, "epoch": 1}, None),
        ({"trainer": {"net": STATE, "ema": STATE}}, "trainer.net"),
        ({"trainer.net": STATE}, "trainer.net"),
        ({**STATE, "step": 7, "note": "text"}, None),
        ({f"module.{k}": v for k, v in STATE.items()}, None),
        ({f"_orig_mod.module.{k}": v for k, v in STATE.items()}, None),
        ({k.replace("a.", "a._orig_mod."): v for k, v in STATE.items()}, None),
    ],
)
def test_a_state_dict_is_found(tmp_path: Path, content: Any, key: str | None) -> None:
    assert same(read_state(saved(tmp_path / "x.pt", content), key))


def test_safetensors_are_told_by_what_is_in_them(tmp_path: Path) -> None:
    for name in ("x.safetensors", "x.bin"):
        save_file(STATE, tmp_path / name)
        assert same(read_state(tmp_path / name))
    torch.save(STATE, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert same(read_state(tmp_path / "old.bin"))


def test_the_step_in_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"model": STATE, "at": {"step": 12, "tensor": torch.tensor(5)}})
    assert read_step(path, "at.step") == 12
    assert read_step(path, "at.tensor") == 5
    save_file(STATE, tmp_path / "x.safetensors", metadata={"step": "40"})
    assert read_step(tmp_path / "x.safetensors", "step") == 40
    for wrong in (path, tmp_path / "x.safetensors"):
        with pytest.raises(InputError, match=r"has no field 'at.nothing' for the step; its fields"):
            read_step(wrong, "at.nothing")


class Unknown:
    """What a pickle may hold: a class that only its writer knows."""


@pytest.mark.parametrize("content", [nn.Linear(2, 2), {"a": STATE, "args": argparse.Namespace()}])
def test_a_pickle_with_more_in_it_is_refused(tmp_path: Path, content: Any) -> None:
    path = saved(tmp_path / "x.pt", content)
    with pytest.raises(InputError) as caught:
        read_state(path)
    text = str(caught.value)
    assert "is a pickle with more in it than tensors and plain values" in text
    assert "torch.save(model.state_dict(), ...)" in text
    assert "safetensors" in text
    assert ("Linear" in text) or ("argparse.Namespace" in text)
    assert "weights_only" not in text, "no one is told to switch the guard off"


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "harm",))

    (tmp_path / "x.pt").write_bytes(pickle.dumps({"w": Harm()}))
    saved(tmp_path / "y.pt", {"w": Harm()})
    for name in ("x.pt", "y.pt"):
        with pytest.raises(InputError):
            read_state(tmp_path / name)
    assert not (tmp_path / "harm").exists()


def cut(path: Path, n: int) -> Path:
    path.write_bytes(path.read_bytes()[:n])
    return path


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    save_file(STATE, tmp_path / "c.safetensors")
    torch.save(STATE, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.pt").write_text("step,loss\n1,2\n")
    (tmp_path / "text.safetensors").write_text("step,loss\n1,2\n")
    (tmp_path / "empty.pt").touch()
    with_program = tmp_path / "program.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # others have them all the same
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), with_program)
    cases = {
        cut(tmp_path / "a.safetensors", 40): "cannot be read: it is cut short, altered, or no",
        cut(tmp_path / "c.safetensors", 5): "cannot be read",
        cut(saved(tmp_path / "b.pt", STATE), 600): "cannot be read: it is cut short",
        cut(tmp_path / "old.pt", -20): "cannot be read: it is cut short",
        tmp_path / "text.pt": "is neither a safetensors file nor one of torch.save",
        tmp_path / "text.safetensors": "cannot be read",
        tmp_path / "empty.pt": "is empty: it is no checkpoint",
        tmp_path / "gone.pt": "cannot be read: No such file",
        with_program: "is a TorchScript program, not weights",
        saved(tmp_path / "list.pt", [1, 2]): "holds a list, not a state dict",
        saved(tmp_path / "none.pt", {"step": 3}): "has no state dict; its fields: step. --key",
    }
    for path, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            read_state(path)
        assert path.name in str(caught.value)


@pytest.mark.parametrize("sums", [True, False])
def test_an_altered_byte_of_weights_is_seen(tmp_path: Path, sums: bool) -> None:
    """By the sums that torch.save writes and torch.load does not read, unless it wrote none."""
    state = {"weight": torch.arange(1000.0)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(sums)
    try:
        torch.save(state, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(read_state(tmp_path / "a.pt")["weight"], state["weight"])
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.index(np.float32(500).tobytes()) + 2] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    if sums:
        with pytest.raises(InputError, match=r"a\.pt cannot be read: it is cut short, altered"):
            read_state(tmp_path / "a.pt")
    else:
        assert not torch.equal(read_state(tmp_path / "a.pt")["weight"], state["weight"])


def test_several_state_dicts_are_not_guessed_at(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"model": STATE, "module": STATE})
    with pytest.raises(InputError, match="several state dicts: model, module; --key says which"):
        read_state(path)
    assert same(read_state(path, "module"))
    with pytest.raises(InputError, match="has no state dict at 'ema'; its fields: model, module"):
        read_state(path, "ema")
    both = saved(tmp_path / "y.pt", {**STATE, "module.a.bias": torch.ones(2)})
    with pytest.raises(InputError, match=r"has 'a\.bias' twice, as 'module\.a\.bias' and without"):
        read_state(both)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ],
)
def test_every_float_becomes_float32(dtype: torch.dtype) -> None:
    values = torch.tensor([1.5, -0.25, 3.0e-3]).to(dtype)
    found = as_float32(values, "w")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values.double().numpy().astype(np.float32))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([1e300], dtype=torch.float64), r"w has numbers of 1e\+300, too large for"),
        (torch.tensor([1]), "w is int64, and weights are dense floats"),
        (torch.ones(2, dtype=torch.complex64), "w is complex64"),
        (torch.eye(2).to_sparse(), "w is sparse_coo float32, and"),
        (torch.ones(2, device="meta"), "w has no numbers: it was saved from the meta device"),
    ],
)
def test_what_float32_has_not_is_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_float32(tensor, "w")
    kept = as_float32(torch.tensor([torch.inf, torch.nan], dtype=torch.float64), "w")
    assert np.isinf(kept[0]) and np.isnan(kept[1]), "a training that diverged is not an overflow"
