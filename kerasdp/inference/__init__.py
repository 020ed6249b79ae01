"""Uses trained models: loads them from checkpoints, evaluates and predicts, and writes what comes of it.

For the functions that `kerasdp.launch` calls, as in recipes/evaluate.py and recipes/predict.py.
"""

from kerasdp.config import Request
from kerasdp.inference.conversion import check_elsewhere, check_target, convert
from kerasdp.inference.outputs import (
    check_classes,
    confusion_matrix,
    draw_confusion,
    probabilities,
    write_evaluation,
    write_predictions,
)
from kerasdp.inference.trained import Samples, Trained, load_trained, open_samples

__all__ = [
    "Request",
    "Samples",
    "Trained",
    "check_classes",
    "check_elsewhere",
    "check_target",
    "confusion_matrix",
    "convert",
    "draw_confusion",
    "load_trained",
    "open_samples",
    "probabilities",
    "write_evaluation",
    "write_predictions",
]
