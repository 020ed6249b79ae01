"""Trains one model many ways and compares: is its training a property of the model, or of the backend?"""

from kerasdp.parity.compare import Comparison, Outcome, Reference, compare, judge
from kerasdp.parity.divergence import Divergence, Tolerance
from kerasdp.parity.trace import Job, Way

__all__ = ["Comparison", "Divergence", "Job", "Outcome", "Reference", "Tolerance", "Way", "compare", "judge"]
