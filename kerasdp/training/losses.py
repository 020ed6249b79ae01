"""Makes the loss of a classification."""

from typing import Any

import keras

from kerasdp.config import Config


@keras.saving.register_keras_serializable("kerasdp")
class SmoothedCrossentropy(keras.losses.Loss):
    """Crossentropy of integer labels, of which a share is spread over all classes (Szegedy et al. 2016).

    The numbers are those of `keras.losses.CategoricalCrossentropy(label_smoothing=)` on one-hot labels.

    Args:
        label_smoothing: the share, from 0, below 1.
        name: of the loss.
        reduction: as in `keras.losses.Loss`.
    """

    def __init__(
        self, label_smoothing: float, name: str = "smoothed_crossentropy", reduction: str = "sum_over_batch_size"
    ):
        super().__init__(name=name, reduction=reduction)
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each sample: labels of shape `(batch,)` or `(batch, 1)`, logits `(batch, classes)`."""
        labels = keras.ops.reshape(keras.ops.cast(y_true, "int32"), keras.ops.shape(y_pred)[:-1])
        targets = keras.ops.one_hot(labels, y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.losses.categorical_crossentropy(
            targets, y_pred, from_logits=True, label_smoothing=self.label_smoothing
        )

    def as_keras(self) -> keras.losses.Loss:
        """Returns what an exported model has in its place: Keras has none for integer labels that are smoothed."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=self.reduction)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"label_smoothing": self.label_smoothing, "name": self.name, "reduction": self.reduction}


def make_loss(config: Config) -> keras.losses.Loss:
    """Makes the crossentropy of integer labels and logits, smoothed as `config.label_smoothing` says."""
    if config.label_smoothing:
        return SmoothedCrossentropy(config.label_smoothing)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
