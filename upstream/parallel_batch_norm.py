"""On two ranks, the moving mean of batch norm covers the samples of both ranks, and is equal on both ranks."""

# backends: torch
# needs: keras 3.16
import keras
import numpy as np
import torch
import torch.multiprocessing as mp


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return np.arange(2.0 * number, 2.0 * number + 2)[:, None], np.ones((2, 1))


def rank(number, address):
    keras.distribution.initialize(address, 2, number)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(Data(), shuffle=False, verbose=0)
    torch.distributed.all_gather(means := [torch.zeros(1), torch.zeros(1)], model.layers[0].moving_mean.value.detach())
    print([float(mean) for mean in means], flush=True)
    assert float(means[0]) == float(means[1]) == 1.5


if __name__ == "__main__":
    mp.spawn(rank, ("127.0.0.1:29514",), 2)
