"""Random streams: reproducible, apart from each other, and normal."""

import numpy as np
import pytest
import torch
from scipy import stats

from mechicl.tasks.streams import generator


def draw(*arguments: object, n: int = 1000) -> torch.Tensor:
    return torch.randn(n, generator=generator(*arguments))  # type: ignore[arg-type]


def test_same_arguments_same_stream() -> None:
    assert torch.equal(draw("train", 3, 7), draw("train", 3, 7))


@pytest.mark.parametrize("other", [("train", 3, 8), ("train", 7, 3), ("initial", 3, 7)])
def test_any_argument_makes_another_stream(other: tuple) -> None:
    first, second = draw("train", 3, 7, n=100_000), draw(*other, n=100_000)
    assert not torch.equal(first, second)
    correlation = np.corrcoef(first.numpy(), second.numpy())[0, 1]
    assert abs(correlation) < 5 / 100_000**0.5


def test_streams_that_share_32_bits_differ() -> None:
    """`manual_seed` alone would make these two one stream."""
    low = torch.randn(4, generator=torch.Generator().manual_seed(5))
    high = torch.randn(4, generator=torch.Generator().manual_seed(5 + 2**32))
    assert torch.equal(low, high), "torch keeps more of its seed now: streams.py can be simpler"
    assert not torch.equal(draw("train", 5), draw("train", 5 + 2**32))


def test_draws_are_standard_normal() -> None:
    values = torch.cat([draw("train", 0, block, n=1000) for block in range(100)])
    assert stats.kstest(values.numpy(), "norm").pvalue > 1e-3
    firsts = torch.cat([draw("train", 0, block, n=16)[:1] for block in range(2000)])
    assert stats.kstest(firsts.numpy(), "norm").pvalue > 1e-3
