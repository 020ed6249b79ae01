"""Makes the Keras callbacks that flags ask for."""

import keras

from kerasdp.config import Config


def make_callbacks(config: Config) -> list[keras.callbacks.Callback]:
    """Makes the callbacks of `config.early_stopping` and `config.ema`; none by default.

    Early stopping looks at the validation loss, or the training loss where there is no validation data.
    """
    callbacks: list[keras.callbacks.Callback] = []
    if config.ema is not None:
        callbacks.append(keras.callbacks.SwapEMAWeights())  # while it evaluates
    if config.early_stopping is not None:
        callbacks.append(_EarlyStopping(config.early_stopping))
    return callbacks


class _EarlyStopping(keras.callbacks.EarlyStopping):
    """Stops by the validation loss if there is one, else by the training loss."""

    def __init__(self, patience: int):
        super().__init__(monitor="val_loss", mode="min", patience=patience, restore_best_weights=True)

    def get_monitor_value(self, logs: dict[str, float]) -> float:
        return logs.get("val_loss", logs["loss"])
