"""What a comparison finds of one way to train."""

import dataclasses

import numpy as np

from kerasdp.parity.divergence import Divergence
from kerasdp.parity.trace import Way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The training on one backend and device count.

    Args:
        way: backend, devices, precision.
        reference: the way that it is compared with.
        losses: of each step.
        differences: of the losses from the reference's, relative, of each step.
        divergence: where it diverges from the reference; None if nowhere.
        round_off: the largest difference in float64, if it diverges in float32 but not there: then round-off has grown,
            and nothing is wrong. None also where a difference in float32 is too large for that from the start.
        error: why it could not be trained; empty if it could.
        seconds: of the whole process.
    """

    way: Way
    reference: Way
    losses: np.ndarray
    differences: np.ndarray
    divergence: Divergence | None = None
    round_off: float | None = None
    error: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Returns whether it was trained, and agrees with the reference."""
        return not self.error and (self.divergence is None or self.round_off is not None)

    def __str__(self) -> str:
        if self.error:
            return f"{self.way} failed: {self.error}"
        if self.divergence is None:
            return f"{self.way} trains as {self.reference}"
        if self.round_off is not None:
            return (
                f"{self.way} diverges from {self.reference} by round-off alone (in float64 they are "
                f"{self.round_off:.1e} apart): {dataclasses.replace(self.divergence, layer='')}"
            )
        return f"{self.way} diverges from {self.reference}: {self.divergence}"
