"""Shows whether a model trains the same on all backends and device counts, and if not, where it first diverges."""

from kerasdp.parity.bisect import Finding, bisect
from kerasdp.parity.compare import Comparison, Outcome, Reference, compare, judge
from kerasdp.parity.divergence import Divergence, Tolerance
from kerasdp.parity.trace import Job, Way

__all__ = [
    "Comparison",
    "Divergence",
    "Finding",
    "Job",
    "Outcome",
    "Reference",
    "Tolerance",
    "Way",
    "bisect",
    "compare",
    "judge",
]
