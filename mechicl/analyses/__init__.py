"""Probes: named analyses of a trajectory, one module a probe, found by name in one registry."""

from mechicl.analyses.forward import forward_of
from mechicl.analyses.probe import Against, Forward, Probe, comparative, get, names, probe

__all__ = ["Against", "Forward", "Probe", "comparative", "forward_of", "get", "names", "probe"]
