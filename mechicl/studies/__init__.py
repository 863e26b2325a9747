"""Many runs: sweeps, studies, and claims of the papers, tested on the runs that they need."""

from mechicl.studies.claims import Claim, claim_names, load_claim
from mechicl.studies.discovery import find_runs
from mechicl.studies.heads import aligned_heads
from mechicl.studies.reproduce import Record, reproduce

__all__ = [
    "Claim",
    "Record",
    "aligned_heads",
    "claim_names",
    "find_runs",
    "load_claim",
    "reproduce",
]
