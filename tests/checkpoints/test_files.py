import errno
import os

import numpy as np
import pytest

from mechicl.checkpoints import files
from mechicl.errors import DamagedRunError
from tests.checkpoints.common import flip_bit

ARRAYS = {
    "m": np.arange(6, dtype=np.float32).reshape(2, 3),
    "count": np.array(7),
    "mask": np.array([True, False]),
    "state": np.arange(3, dtype=np.uint8),
    "none": np.zeros((0, 2)),
}


def test_arrays_come_back_exactly(tmp_path):
    files.save_arrays(tmp_path / "a", ARRAYS)
    back = files.load_arrays(tmp_path / "a")
    assert back.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        np.testing.assert_array_equal(back[name], array)
    files.save_arrays(tmp_path / "b", {})
    assert files.load_arrays(tmp_path / "b") == {}


def test_each_flipped_byte_of_the_data_is_noticed(tmp_path):
    path = tmp_path / "a"
    files.save_arrays(path, {"m": ARRAYS["m"]})
    whole = path.read_bytes()
    for position in range(len(whole) - 24, len(whole)):
        flip_bit(path, position)
        with pytest.raises(DamagedRunError, match="checksum"):
            files.load_arrays(path)
        path.write_bytes(whole)
    for length in (0, 5, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedRunError, match="cannot be read"):
            files.load_arrays(path)
    with pytest.raises(DamagedRunError, match="missing"):
        files.load_arrays(tmp_path / "none")


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, stage):
    path = tmp_path / "a"
    files.write_file(path, b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if stage == "fsync" else (files.Path, "replace")), fail)
    with pytest.raises(OSError, match="No space"):
        files.write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_data_are_flushed_before_they_take_their_place(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, files.Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(
        files.Path, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1]
    )
    files.write_file(tmp_path / "a", b"x")
    assert calls == ["fsync", "replace", "fsync"]
