"""On two ranks, `predict` returns the outputs of all samples."""

# backends: torch
# needs: keras 3.16
import keras
import numpy as np
import torch.multiprocessing as mp


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return np.arange(2.0 * number, 2.0 * number + 2)[:, None], np.ones((2, 1))


def rank(number, address):
    keras.distribution.initialize(address, 2, number)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    outputs = model.predict(Data(), verbose=0)
    print(len(outputs), flush=True)
    assert len(outputs) == 8


if __name__ == "__main__":
    mp.spawn(rank, ("127.0.0.1:29511",), 2)
