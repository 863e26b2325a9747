"""Being a user whom permissions bind, also where tests run as root."""

import multiprocessing.pool  # noqa: F401  # xarray imports it late, from files that may be root's
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def nobody() -> Iterator[None]:
    """Be a user whom permissions bind."""
    if os.name == "nt":
        pytest.skip("permissions are other ones on Windows; lifted on POSIX")
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
