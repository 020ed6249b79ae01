"""Training finishes if two ranks have different numbers of batches."""

# backends: torch
# needs: keras 3.16
import datetime

import keras
import numpy as np
import torch
import torch.multiprocessing as mp


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, number):
        return np.arange(2.0 * number, 2.0 * number + 2)[:, None], np.ones((2, 1))


def rank(number, address):
    torch.distributed.init_process_group("gloo", f"tcp://{address}", datetime.timedelta(seconds=20), 2, number)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(Data(), verbose=0)
    print(int(model.optimizer.iterations), flush=True)


if __name__ == "__main__":
    mp.spawn(rank, ("127.0.0.1:29515",), 2)
