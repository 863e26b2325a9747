"""Where training may run, by name; torch is asked only once it is needed."""

from mechicl.errors import InputError

DEVICES = ("auto", "cpu", "cuda")


def require_device(device: object) -> None:
    """Raise InputError for what is the name of no device."""
    if device not in DEVICES:
        raise InputError(f"device is one of {', '.join(DEVICES)}; given {device!r}")
