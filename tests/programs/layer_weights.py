"""Makes the weights of every layer of keras_layers.py, by the kit and, where asked, by plain Keras.

    python layer_weights.py BACKEND [compare]

Prints, for each layer, what its variables are, with a digest of the kit's values, and how they compare with
plain Keras'.
"""

import hashlib
import json
import os
import random
import sys

import numpy as np

import kerasdp


def build(make, shapes):
    """Returns the variables of a layer that has been called, with their values."""
    import keras

    layer = make()
    one = isinstance(shapes, tuple) and not isinstance(shapes[0], tuple)
    inputs = [keras.KerasTensor(shape) for shape in ([shapes] if one else shapes)]
    layer(inputs) if isinstance(shapes, list) else layer(*inputs)
    return [(variable, keras.ops.convert_to_numpy(variable)) for variable in layer.variables]


def digest(value):
    """Returns of integers, which are seeds and of another type on each backend, their lower 32 bits."""
    value = np.ascontiguousarray(value)
    if value.dtype.kind in "iu":
        return (value.astype("int64") % 2**32).tolist()
    return hashlib.sha256(value.tobytes()).hexdigest()


def facts(variable, value):
    is_seed = variable.name == "seed_generator_state"
    # Integers are of 32 or 64 bits, as the backend likes.
    dtype = "integer" if "int" in str(variable.dtype) else str(variable.dtype)
    shape = [int(size) for size in variable.shape]
    return {"is": [variable.name, shape, variable.trainable, dtype], "digest": digest(value), "seed": is_seed}


def compare(own, plain):
    """Returns how far two samples' means and spreads are apart, in standard errors, and how many exceed the other."""
    own, plain = own.astype("float64").ravel(), plain.astype("float64").ravel()

    def error_of_spread(values):
        squares = (values - values.mean()) ** 2
        return squares.std() / (2 * np.sqrt(squares.mean() * values.size))

    error = np.hypot(error_of_spread(own), error_of_spread(plain))
    beyond = [((one < other.min()).sum(), (one > other.max()).sum()) for one, other in ((own, plain), (plain, own))]
    return {
        "size": own.size,
        "mean": abs(own.mean() - plain.mean()) / np.sqrt((own.var() + plain.var()) / own.size),
        "spread": abs(own.std() - plain.std()) / error,
        "beyond": int(np.max(beyond)),
    }


def mixed():
    """Returns a model that is built when it is called, layers within layers first."""
    import keras

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.late, self.early = keras.layers.Dense(4, name="dense"), keras.layers.LSTM(4, dropout=0.1)
            self.attention = keras.layers.MultiHeadAttention(2, 3, dropout=0.1)

        def call(self, x):
            return self.late(self.attention(self.early(x)[:, None], x))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Block(), Block()]
            self.head = keras.layers.Dense(2, kernel_initializer=lambda shape, dtype: keras.random.normal(shape))

        def call(self, x):
            return self.head(self.blocks[0](x) + self.blocks[1](x))

    return Model()


def digests(model):
    import keras

    values = [keras.ops.convert_to_numpy(variable) for variable in model.variables]
    # Of a seed its first word: the second counts the draws.
    return [digest(value[:1] if value.dtype.kind in "iu" else value) for value in values]


def train(runner):
    import keras
    import keras_layers

    rows = np.zeros((2, 5, 4), "float32")
    models = {}
    models["without a scope, called"] = mixed()  # the first: numbered from 0, as within a scope
    models["without a scope, called"](rows)
    for how in ("called", "given to evaluate"):
        with runner.scope():
            models[how] = mixed()
            if how == "called":
                models[how](rows)
            models[how].compile("sgd", "mse")
        runner.evaluate(models[how], rows, np.zeros((2, 5, 2), "float32"), verbose=0)
    # Neither of these may matter: what Python has drawn, and what has been built.
    random.seed(os.getpid())
    for _ in range({"torch": 0, "jax": 1, "tensorflow": 3}[runner.config.backend]):
        keras.layers.MultiHeadAttention(2, 2).build((None, 3, 4), (None, 3, 4))
        keras.random.normal((3,))
    made = {}
    for name, (make, shapes) in keras_layers.LAYERS.items():
        with runner.scope():
            made[name] = build(make, shapes)
    return made, {how: digests(model) for how, model in models.items()}


def main():
    made, models = kerasdp.launch(train, backend=sys.argv[1], num_devices=1)
    import keras_layers

    result = {name: [facts(*pair) for pair in pairs] for name, pairs in made.items()}
    if sys.argv[2:] == ["compare"]:
        import keras

        for name, pairs in made.items():
            keras.utils.set_random_seed(sum(map(ord, name)))
            for one, (_, own), (variable, plain) in zip(
                result[name], pairs, build(*keras_layers.LAYERS[name]), strict=True
            ):
                one["plain"] = facts(variable, plain)
                if not one["seed"] and not np.array_equal(own, plain):
                    one["distance"] = compare(own, plain)
    print("RESULT " + json.dumps({"layers": result, "models": models, "unlisted": keras_layers.unlisted()}))


if __name__ == "__main__":
    main()
