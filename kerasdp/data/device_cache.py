"""Keeps data on the devices while `fit` runs. Does not import Keras."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


class DeviceCache:
    """Arrays that stay on the devices: each device has all of them from their first use on."""

    def __init__(self, arrays: Any):
        self._arrays, self._copies = arrays, None

    def copies(self, make: Callable[[Any], Any]) -> Any:
        """Returns what `make` made of the arrays when it was first called."""
        if self._copies is None:
            self._copies = make(self._arrays)
        return self._copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows:
    """Rows of arrays that stay on the devices.

    Args:
        kept: the arrays.
        numbers: of the rows, int32.
    """

    kept: DeviceCache
    numbers: np.ndarray
