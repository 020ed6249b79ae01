"""A run over two hosts, one of a process by itself on the first of them, and the two again.

python alone_after_hosts.py SETTINGS: fields of kerasdp.Config as JSON.
"""

import json
import sys

import numpy as np

import kerasdp


def train(runner):
    import keras

    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x = np.ones((20, 4), "float32")
    return runner.fit(model, x, np.zeros((20, 2)), batch_size=6, verbose=0).history["loss"]


def refused(runner):
    raise kerasdp.UserError("only here")


if __name__ == "__main__":
    settings = {"device": "cpu", "verbose": 0} | json.loads(sys.argv[1])
    found = [kerasdp.launch(train, **settings)]
    if settings["host_rank"] == 0:
        by_itself = settings | {"hosts": "1", "host_rank": None, "coordinator": None}
        found.append(kerasdp.launch(train, **by_itself))
        try:
            kerasdp.launch(refused, **by_itself)
        except kerasdp.UserError as error:
            assert str(error) == "only here", error
    found.append(kerasdp.launch(train, **settings))
    print("RESULT", json.dumps(found))
