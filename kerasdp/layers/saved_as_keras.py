"""How the kit's layers are named in a saved model: as Keras' own."""

from keras.src import api_export


def saved_as_keras(layer_class: type) -> type:
    """Class decorator: models are saved with the Keras layer that the class derives from.

    Weights and config are those of Keras' layer, so such a file loads where there is no kerasdp; `portable` turns the
    layer back into ours. Keras (3.15) looks a class up in this table before it writes the name of its module.
    """
    name = f"keras.layers.{layer_class.__name__}"
    api_export.REGISTERED_OBJS_TO_NAMES[layer_class] = name
    return layer_class
