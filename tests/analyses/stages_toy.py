"""Runs of the Markov chain made by hand that go through stages."""

import numpy as np
import xarray as xr

from tests.analyses import markov_toy


def of_regression(trajectory: xr.Dataset) -> xr.Dataset:
    """Return `markov_toy.of_regression` of a run, made to learn in two stages.

    Attention is even at the first step. Before the middle of training the heads of block 2 look at
    block 1, without values; after it they are as they were. Values are whole from the second step.
    """
    made = markov_toy.of_regression(trajectory).copy(deep=True)
    kq, ov = made["KQ"].values, made["OV"].values  # (seed, step, layer, head, ...)
    n_steps = made.sizes["step"]
    for index in range(n_steps):
        progress = index / max(n_steps - 1, 1)
        second = kq[:, index, ..., 1, 3] > 0  # the fourth token looks two back
        if index == 0 and n_steps > 1:
            kq[:, index] *= 0.0
            ov[:, index] *= 0.0
        elif n_steps > 1:
            ov[:, index] /= progress
            if progress < 0.5:
                nearer = np.roll(kq[:, index], 2, axis=-2)
                kq[:, index] = np.where(second[..., None, None], nearer, kq[:, index])
                ov[:, index] *= np.where(second, 0.0, 1.0)[..., None, None]
    return made
