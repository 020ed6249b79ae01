"""Makes a Keras model train the same on every backend and device count."""

import keras

from kerasdp.layers import BatchNormalization


def portable(model: keras.Model, batch_norm: str = "sync") -> keras.Model:
    """Gives each batch norm of a model the same meaning everywhere.

    The layers are changed in place, so it works for any model: functional, Sequential, nested, subclassed.

    Args:
        model: any Keras model.
        batch_norm: `"sync"`: statistics over the global batch; `"replica"`: over each replica's part.

    Returns:
        The same model.
    """
    for layer in model._flatten_layers():
        # Only Keras' own class: a subclass of somebody's may do anything in its `call`.
        if type(layer) in (keras.layers.BatchNormalization, BatchNormalization):
            layer.__class__ = BatchNormalization
            layer.statistics = batch_norm
    return model
