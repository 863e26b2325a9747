"""`--set KEY=VALUE`: settings from the shell, values read as YAML."""

from collections.abc import Sequence
from typing import Any

from mechicl.errors import InputError, canonical


def parse(assignments: Sequence[str]) -> dict[str, Any]:
    """Return settings by key: `["d=7", "noise_variance=0.5"]` gives `{"d": 7, ...}`.

    Values are YAML, so `null`, `[1, 2]` and `{every: 10}` mean what they say. Raises InputError for
    what is not `KEY=VALUE`, for a value that is not YAML, and for a key given twice.
    """
    import yaml

    settings: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"--set takes KEY=VALUE; given {assignment!r}")
        if key in settings:
            raise InputError(f"--set gives {key} twice")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InputError(f"--set {key}: {value!r} cannot be read as a value (YAML)") from None
        if isinstance(settings[key], str):
            settings[key] = _number(settings[key])
    return settings


def _number(text: str) -> str | float:
    """Read `1e-3`, which YAML 1.1 takes for a string because it has no dot."""
    try:
        return float(text)
    except ValueError:
        return text


def named_runs(given: Sequence[str]) -> list[str] | dict[str, str]:
    """Return runs of `--against`: by name where every one has one, `NAME=RUN`, else a list.

    Raises InputError where some are named and some are not, and for a name given twice.
    """
    pairs = [each.partition("=") for each in given]
    named = [equals and "/" not in name for name, equals, _ in pairs]
    if not any(named):
        return list(given)
    if not all(named):
        raise InputError(f"--against takes RUN or NAME=RUN, one way for all; given {given}")
    runs = {name.strip(): path for name, _, path in pairs}
    if len(runs) < len(pairs):
        raise InputError(f"--against gives one name twice: {', '.join(given)}")
    return runs


def by_probe(settings: dict[str, Any], probes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sort `PROBE.KEY` settings by probe; a bare `KEY` belongs to the one probe that is named.

    Raises InputError for a bare key with several probes, for a probe that is not among `probes`,
    and for a setting that is given twice.
    """
    by_name: dict[str, dict[str, Any]] = {probe: {} for probe in probes}
    for given, value in settings.items():
        probe, dot, key = given.partition(".")
        if not dot:
            if len(probes) != 1:
                raise InputError(
                    f"--set {given}: {len(probes)} probes run, so say whose setting it is: "
                    f"--set PROBE.{given}=VALUE"
                )
            probe, key = probes[0], given
        probe, key = canonical(probe), canonical(key)
        if probe not in by_name:
            raise InputError(
                f"--set {given}: probe {probe!r} is not among those that run: {', '.join(probes)}"
            )
        if key in by_name[probe]:
            raise InputError(f"--set gives {probe}.{key} twice")
        by_name[probe][key] = value
    return by_name
