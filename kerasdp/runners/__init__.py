"""One module a backend, with the same names in each: `count_gpus`, `start`, and the class `Replicas`.

`Replicas` is the whole of what differs between the backends in a worker; `kerasdp.runner.Runner` is the same for all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFunctions:
    """What Keras' trainer calls for each batch, in place of the functions that it would make itself.

    Their arguments are those of the backend's trainer (keras/src/backend/*/trainer.py).
    """

    train: Callable[..., Any]
    test: Callable[..., Any]
    predict: Callable[..., Any]
