"""Trains a small model, and gets Ctrl-C in the second epoch. Takes the flags of `recipes/train.py`."""

import os
import signal

import keras
import numpy as np

import kerasdp


class CtrlC(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)


def train(runner):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, epochs=3, callbacks=[CtrlC()])


if __name__ == "__main__":
    kerasdp.main(train)
