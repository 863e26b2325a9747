"""Many runs: claims of the papers, tested on the runs that they need."""

from mechicl.studies.claims import Claim, claim_names, load_claim
from mechicl.studies.report import Report, report
from mechicl.studies.reproduce import Record, reproduce

__all__ = ["Claim", "Record", "Report", "claim_names", "load_claim", "report", "reproduce"]
