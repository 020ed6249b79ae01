"""Tests whether a model has the same losses on all backends and numbers of devices, and finds the first difference.

`compare` trains a model on several backends and numbers of devices, and compares the steps of these training runs.
`bisect` finds the operation that two backends compute differently.

Example:
    ```python
    import keras
    import numpy as np
    import kerasdp

    random = np.random.default_rng(0)
    data = random.random((64, 8)), random.random((64, 1))

    def build_model():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    comparison = kerasdp.parity.compare(build_model, data, backends=["jax"], device_counts=[1, 2], steps=10)
    print(comparison.table())
    ```
"""

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
