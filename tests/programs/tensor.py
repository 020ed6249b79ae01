"""Trains small models cut over four devices, and whole on one, in one process; prints what came out.

python tensor.py FOLDER CASE ...    # a case is the model and the optimizer, as "convnet, sgd"
"""

import functools
import json
import pathlib
import sys

import numpy as np

import kerasdp

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randint(0, 255, (45, 8, 8, 3)).astype("uint8"), RANDOM.randint(0, 10, 45)
# Divides the samples, so that each program is compiled for one shape, but does not divide by the devices.
BATCH_SIZE = 15


def residual():
    """A block with a shortcut, batch norm and dropout."""
    import keras
    from keras import layers

    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(layers.Rescaling(1 / 255)(inputs))
    shortcut = x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.Add()([layers.BatchNormalization()(x), shortcut]))
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(10)(x), name="residual")


def compiled(runner, name, optimizer):
    import keras

    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
        # A bias ahead of batch norm has no gradient but round-off, which Adam's own epsilon lets it divide by itself.
        "adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-3),
    }
    with runner.scope():
        model = residual() if name == "residual" else kerasdp.build_model(name, X.shape[1:], 10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers[optimizer](), loss, metrics=["accuracy"])
    return model


def learn(runner):
    cases = [tuple(case.split(", ")) for case in sys.argv[2:]]
    return {
        ", ".join(case): learn_one(runner, compiled(runner, *case), everything=case == ("residual", "adam"))
        for case in cases
    }


def learn_one(runner, model, everything):
    from learn_classes import fitted

    validation_data = (X, Y) if everything else None
    losses, history = fitted(runner, model, X, Y, batch_size=BATCH_SIZE, epochs=3, validation_data=validation_data)
    numbers = {"losses": losses, "history": history}
    if everything:
        numbers["evaluate"] = runner.evaluate(model, X, Y, return_dict=True)
        numbers["predictions"] = runner.predict(model, X, batch_size=3).tolist()  # fewer than devices
    numbers["weights"] = [weight.tolist() for weight in model.get_weights()]
    return {"numbers": numbers, "places": places(model), "description": runner.state.description}


def places(model):
    """Of each weight: its shape, that of the part on a device, and those of the same part of its slots."""
    from kerasdp.keras_compat.optimizers import slots_of

    def part(variable):
        return list(variable.value.addressable_shards[0].data.shape)

    weights = model.trainable_variables
    slots = [[] for _ in weights]
    for (_, place), slot in slots_of(model.optimizer, len(weights)).items():
        slots[place].append(part(slot))
    slots = {id(weight): parts for weight, parts in zip(weights, slots, strict=True)}
    return [[w.name, list(w.shape), part(w), slots.get(id(w), [])] for w in model.weights]


def one_more_epoch(epochs, runner):
    runner.fit(compiled(runner, "residual", "adam"), X, Y, batch_size=BATCH_SIZE, epochs=epochs)


def spoiled(runner):
    """What is said of a model of which one device holds another bias, which all have whole."""
    import jax

    model = compiled(runner, "residual", "sgd")
    bias = model.weights[-1]
    runner.check_replicas(model)
    copies = [shard.data + number // 3 for number, shard in enumerate(bias.value.addressable_shards)]
    bias._value = jax.make_array_from_single_device_arrays(bias.shape, bias.value.sharding, copies)
    runner.check_replicas(model)


def nothing_divides(runner):
    import keras

    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="three")
        model.compile("sgd", "mse")
    runner.fit(model, np.zeros((8, 4)), np.zeros((8, 3)))


def launched(train, strategy, **settings):
    # Four devices are there from the start: the first run has them.
    num_devices = 4 if strategy == "tensor" else 1
    settings = {"device": "cpu", "verbose": 0, "log_every": 1} | settings
    config = kerasdp.Config(backend="jax", strategy=strategy, num_devices=num_devices, **settings)
    return kerasdp.launch(train, config)


def error_of(train):
    try:
        return launched(train, "tensor")
    except kerasdp.RunError as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    result = {strategy: launched(learn, strategy) for strategy in ("tensor", "data")}
    for epochs, strategy in enumerate(("tensor", "data", "tensor"), 1):
        work = functools.partial(one_more_epoch, epochs)
        launched(work, strategy, workdir=sys.argv[1], resume=epochs > 1)
    lines = pathlib.Path(sys.argv[1], "steps.jsonl").read_text().splitlines()
    result["in turns"] = [json.loads(line)["loss"] for line in lines]
    result["errors"] = {train.__name__: error_of(train) for train in (spoiled, nothing_divides)}
    print("RESULT " + json.dumps(result))
