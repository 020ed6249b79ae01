"""Judges what was recorded: which models train alike in all ways, which are refused, which differ."""

import dataclasses
import math
import pathlib
from collections.abc import Set
from typing import Any

from tests.real_code.run import OPTIMIZERS_OF, WAYS, WAYS_OF, read_results, results_file

FLOAT32, FLOAT64 = 1e-5, 1e-9
# Of the way that all weights went. Adam moves a weight whose gradient is round-off (a key's bias in attention) by the
# sign of that, so in float32 it says less than the loss.
LEARNED = {"float32": 1e-2, "float64": 1e-6}
# Why what is refused cannot be trained, by a part of the message.
REASONS: dict[str, str] = {
    "encoder_block_attn_mask_layer": "KerasHub 0.32 reshapes the mask of XLNet from (rows, time) to (time, rows), "
    "instead of transposing the mask. So a row gets the masks of other rows.",
    "layer dropout works on": "The samples of this model are on axis 1.",
    "mixes the samples of a batch": "The outputs compare every two rows of the batch, but a device has only the rows "
    "of its shard.",
    "computes different values for a split batch": "What it gives for a row depends on the other rows of the batch.",
    "assigns to the trainable weight": "On jax, the gradient would include the values that a call assigns to trainable "
    "weights.",
}


@dataclasses.dataclass(kw_only=True)
class Cell:
    """One model with one optimizer in one way, beside its reference."""

    way: str
    result: dict[str, Any]
    unchecked: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the training with check="off"
    losses: float = math.inf
    learned: float = math.inf
    same_start: bool = False
    limit: float = FLOAT32  # of the losses

    def measure(self, first: dict[str, Any]) -> None:
        """Compares with the reference what was trained; if it was refused, what was trained without the check."""
        result = self.result if "losses" in self.result else self.unchecked
        if "losses" in result:
            self.losses = relative(first["losses"], result["losses"])
            self.learned = max(map(apart, first["learned"], result["learned"]))
            self.same_start = result["initial"] == first["initial"] and result["weights"] == first["weights"]

    @property
    def alike(self) -> bool:
        """Whether round-off alone is between them, in float32."""
        return self.same_start and self.losses <= self.limit and self.learned <= LEARNED["float32"]

    @property
    def refusal(self) -> str:
        return self.result.get("refused", "")

    @property
    def error(self) -> str:
        return self.result.get("error", "")


@dataclasses.dataclass(kw_only=True)
class Verdict:
    """One model with one optimizer in all ways."""

    model: str
    optimizer: str
    cells: dict[str, list[Cell]]  # by precision

    @property
    def word(self) -> str:
        """`alike`, `alike in float64`, `refused`, `error`, `differs`, or `not run`; the worst of all ways."""
        cells = self.cells["float32"]
        if any(cell.error for cell in cells):
            return "error"
        if not cells or any(not cell.result for cell in cells):
            return "not run"
        trained = [cell for cell in cells if not cell.refusal]
        if not trained or self._agree("float32"):
            return "refused" if len(trained) < len(cells) else "alike"
        if self.cells["float64"] and self._agree("float64"):
            return "refused" if len(trained) < len(cells) else "alike in float64"
        return "differs"

    def __str__(self) -> str:
        parts = []
        for precision, cells in self.cells.items():
            for cell in cells:
                words = cell.error or cell.refusal or f"loss {cell.losses:.1e}, weights {cell.learned:.1e}"
                words += "" if cell.same_start or "losses" not in cell.result else ", other initial weights"
                parts.append(f"{cell.way} {precision}: {words}")
        return f"{self.model}, {self.optimizer}: {self.word}: " + "; ".join(parts)

    @property
    def refusals(self) -> list[str]:
        return sorted({cell.refusal for cell in self.cells["float32"] if cell.refusal})

    def largest(self, precision: str) -> float:
        """The largest relative difference of a loss."""
        return max((cell.losses for cell in self.cells[precision] if "losses" in cell.result), default=math.nan)

    def _agree(self, precision: str) -> bool:
        limit = FLOAT32 if precision == "float32" else FLOAT64
        cells = [cell for cell in self.cells[precision] if not cell.refusal]
        return all(
            cell.same_start and cell.losses <= limit and cell.learned <= LEARNED[precision] for cell in cells
        ) and bool(cells)


def judge(
    out: pathlib.Path, names: list[str], gallery: str = "real_code", draws: Set[str] = frozenset()
) -> list[Verdict]:
    """A verdict for each model and optimizer; `draws` are those that draw other random numbers in Keras' own fit."""
    results = {
        (way, precision): read_results(results_file(out, way, precision))
        for way in WAYS_OF[gallery]
        for precision in ("float32", "float64")
    }
    verdicts = []
    for name in names:
        for optimizer in OPTIMIZERS_OF[gallery]:
            cells: dict[str, list[Cell]] = {}
            for precision in ("float32", "float64"):
                found = {way: results[way, precision].get((name, optimizer), {}) for way in WAYS_OF[gallery]}
                beside_keras = gallery == "strangers" and name not in draws
                wanted = precision == "float32" or any(found.values())
                cells[precision] = compare(found, beside_keras) if wanted else []
            verdicts.append(Verdict(model=name, optimizer=optimizer, cells=cells))
    return verdicts


def compare(found: dict[str, dict[str, Any]], beside_keras: bool) -> list[Cell]:
    """Each way beside the first that trained, or beside Keras' own fit on its backend.

    A backend on which Keras' own fit fails is left out, and one on which it was not run if it is the reference.
    """
    trained = [found[way] for way in WAYS if "losses" in found[way]]
    cells = []
    for way in WAYS:
        own = found.get(way.split(":")[0] + ":keras", {})
        if "error" in own or (beside_keras and not own):
            continue
        cell = Cell(way=way, result=found[way], unchecked=found.get(f"{way}:off", {}))
        for first in [own] if beside_keras else trained[:1]:
            cell.measure(first)
        cells.append(cell)
    return cells


def apart(expected: list[float], received: list[float]) -> float:
    """How far two ways of some weights are apart, relative to the length of the first; infinite if any is NaN."""
    if not all(map(math.isfinite, expected + received)):
        return math.inf
    difference = max(abs(a - b) for a, b in zip(expected, received, strict=True))
    return difference / expected[0] if expected[0] else difference


def relative(expected: list[float], received: list[float]) -> float:
    """The largest difference, relative to the larger number; infinite if there are not as many, or any is NaN."""
    if len(expected) != len(received) or not all(map(math.isfinite, expected + received)):
        return math.inf
    return max(
        (abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(expected, received, strict=True)), default=math.inf
    )
