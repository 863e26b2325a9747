"""Many runs: claims of the papers, tested on the runs that they need."""

from mechicl.studies.claims import Claim, claim_names, load_claim
from mechicl.studies.reproduce import Record, reproduce

__all__ = ["Claim", "Record", "claim_names", "load_claim", "reproduce"]
