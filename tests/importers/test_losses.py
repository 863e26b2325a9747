"""Losses of others: a CSV, and every slip in one."""

from pathlib import Path

import numpy as np
import pytest

from mechicl.errors import InputError
from mechicl.importers.losses import read_losses


def written(folder: Path, text: str) -> Path:
    path = folder / "losses.csv"
    path.write_text(text)
    return path


def test_losses_are_placed_and_the_rest_is_nan(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffloss, step\n0.5,0\n0.25,2\nnan,3\n0.1,5\n0.1,9\n")
    values, n_late = read_losses(path, (0,), 5)
    np.testing.assert_array_equal(values, [[0.5, np.nan, 0.25, np.nan, np.nan]])
    assert (values.dtype, n_late) == (np.float32, 2)
    values, _ = read_losses(written(tmp_path, "step,seed,loss\n1,7,0.5\n0,2,1\n"), (2, 7), 2)
    np.testing.assert_array_equal(values, [[1, np.nan], [np.nan, 0.5]])
    assert np.isnan(read_losses(None, (0, 1), 3).values).all()


@pytest.mark.parametrize(
    ("text", "seeds", "message"),
    [
        ("step,loss\n0,1\n0,2\n", (0,), "line 3 has step 0 again"),
        ("step,loss\n0,1\n1\n", (0,), "line 3 is not numbers"),
        ("step,loss\n0.5,1\n", (0,), "line 2 is not numbers: 0.5, 1"),
        ("step,loss\n-1,1\n", (0,), "line 2 is of step -1"),
        ("step,value\n0,1\n", (0,), "the columns step, loss; it has step, value"),
        ("step,loss\n0,1\n", (0, 1), "the columns step, loss, seed; it has step, loss"),
        ("step,loss,seed\n0,1,4\n", (0, 1), "line 2 is of seed 4; imported are 0, 1"),
        ("", (0,), "it has none"),
        ("step,loss,loss\n0,1,2\n", (0,), "have the column loss more than once"),
        ("step,loss\n0,0,53\n", (0,), "line 2 has more numbers than there are columns: 0, 0, .'53"),
        ("step,loss\n0,1e300\n", (0,), r"line 2 has a loss of 1e\+300, too large for float32"),
        ("step,loss\n" + "x,1\n" * 9, (0,), "line 6 is not numbers: x, 1; and 4 more"),
    ],
)
def test_slips_are_said(tmp_path: Path, text: str, seeds: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_losses(written(tmp_path, text), seeds, 10)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("gone.csv", "bytes.csv", "."):
        with pytest.raises(InputError, match="cannot be read"):
            read_losses(tmp_path / name, (0,), 3)
