"""Dropout whose mask is the same on every backend and device count."""

from collections.abc import Callable
from typing import Any

import keras

from kerasdp.keras_compat.saving import saved_as_keras
from kerasdp.portability import random as random_numbers


@saved_as_keras
class Dropout(keras.layers.Dropout):
    """Keras' dropout with a portable mask (Srivastava et al. 2014, JMLR 15:1929).

    The mask is a pure function of the layer's seed, of how often the layer was called in training (which is part of the
    model's state, as in Keras), and of the sample's row in the global batch: bit-equal on every backend and device
    count. Arguments and config are Keras' own; `noise_shape` may have None for axes of the inputs.
    """

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Drops units in training, and scales the others by `1 / (1 - rate)`."""
        if not training or self.rate == 0:
            return inputs
        return random_numbers.dropout(inputs, self.rate, self._mask_shape(inputs), self.seed_generator)

    def _mask_shape(self, inputs: Any) -> Any:
        return self.noise_shape


class _SpatialMask:
    """One number for a whole feature map (Tompson et al. 2015, arXiv:1411.4280)."""

    call = Dropout.call
    _get_noise_shape: Callable[[Any], tuple[Any, ...]]  # of Keras' layer

    def _mask_shape(self, inputs: Any) -> Any:
        return None, *self._get_noise_shape(inputs)[1:]


@saved_as_keras
class SpatialDropout1D(_SpatialMask, keras.layers.SpatialDropout1D):
    """`keras.layers.SpatialDropout1D` with a portable mask; see `Dropout`."""


@saved_as_keras
class SpatialDropout2D(_SpatialMask, keras.layers.SpatialDropout2D):
    """`keras.layers.SpatialDropout2D` with a portable mask; see `Dropout`."""


@saved_as_keras
class SpatialDropout3D(_SpatialMask, keras.layers.SpatialDropout3D):
    """`keras.layers.SpatialDropout3D` with a portable mask; see `Dropout`."""
