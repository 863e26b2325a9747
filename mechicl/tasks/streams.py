"""Random streams: independent generators, each a pure function of what it is for."""

import numpy as np
import torch

_HEADER_WORDS = 3  # seed, (left, seeded), next: what precedes the state words of torch's mt19937
_STATE_WORDS = 624


def generator(purpose: str, *indices: int) -> torch.Generator:
    """Return a CPU generator for `purpose` (such as `"train"`) and `indices` (such as seed, block).

    The same arguments give the same stream in every process. `manual_seed` keeps 32 bits of its
    seed, and a long run has enough (seed, block) pairs for two of them to collide; so the whole
    state of the Mersenne Twister is filled, from a NumPy SeedSequence over purpose and indices.
    """
    entropy = [int.from_bytes(purpose.encode(), "big"), *indices]
    words = np.random.SeedSequence(entropy).generate_state(_STATE_WORDS, np.uint32)
    stream = torch.Generator()
    stream.manual_seed(0)  # marks the state as fresh: the next draw begins with a full twist
    state = stream.get_state()
    state.numpy().view(np.uint64)[_HEADER_WORDS : _HEADER_WORDS + _STATE_WORDS] = words
    stream.set_state(state)
    return stream
