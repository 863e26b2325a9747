"""Warnings, as a line on standard error each."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def remarks() -> Iterator[None]:
    """Say warnings in a line, once each, without the place in the code that raised them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(text, file=sys.stderr)
