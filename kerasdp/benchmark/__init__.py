"""Measures kerasdp, hand-written loops and plain Keras `fit` side by side; and pipelines of many split sizes."""

from kerasdp.benchmark.contenders import PEERS
from kerasdp.benchmark.measure import Measured, compare
from kerasdp.benchmark.pipeline_study import Measurement, measured, stage_work, study

__all__ = ["PEERS", "Measured", "Measurement", "compare", "measured", "stage_work", "study"]
