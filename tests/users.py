"""Being a user whom permissions bind, also where tests run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def nobody() -> Iterator[None]:
    """Be a user whom permissions bind.

    What is imported late comes from files that may be root's: do once before what is done here.
    """
    if os.name == "nt":
        pytest.skip("permissions are other ones on Windows; lifted on POSIX")
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
