"""Trains small models whose losses or gradients Keras computes otherwise on each backend; prints what came out.

python same_numbers.py BACKEND FIELDS [CASE ...]: FIELDS of kerasdp.Config, as JSON
"""

import json
import sys

import numpy as np
from starting import printed


def probabilities(keras, numbers):
    """Softmax and sigmoid outputs, most of which are so sure that Keras clips them."""
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    image = keras.layers.Reshape((2, 1, 3))(hidden)
    outputs = {
        "pixels": keras.layers.Conv2D(3, 1, activation="softmax", name="pixels")(image),
        "kind": keras.layers.Dense(4, "softmax", name="kind")(hidden),
        "coded": keras.layers.Softmax(name="coded")(keras.layers.Dense(4, name="coded_logits")(hidden)),
        "is": keras.layers.Dense(3, "sigmoid", name="is")(hidden),
    }
    losses = {
        "pixels": keras.losses.SparseCategoricalCrossentropy(),
        "kind": keras.losses.SparseCategoricalCrossentropy(),
        "coded": keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
        "is": keras.losses.BinaryCrossentropy(),
    }
    kinds = numbers.randint(0, 4, 24)
    y = {"pixels": numbers.randint(0, 3, (24, 2, 1)), "kind": kinds, "coded": np.eye(4)[kinds[::-1]].astype("float32"),
         "is": numbers.randint(0, 2, (24, 3)).astype("float32")}  # fmt: skip
    return keras.Model(inputs, outputs), losses, numbers.randn(24, 5).astype("float32"), y


def attention(keras, numbers):
    """Tokens of which some samples have none at all: all keys of these are masked."""
    tokens = np.where(np.arange(6) < numbers.randint(0, 7, 24)[:, None], numbers.randint(1, 9, (24, 6)), 0)
    tokens[::5] = 0
    inputs = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(9, 8, mask_zero=True)(inputs)
    attended = keras.layers.MultiHeadAttention(2, 3)(embedded, embedded)
    causal = keras.layers.MultiHeadAttention(2, 3)(attended, attended, use_causal_mask=True)
    heads = keras.ops.reshape(causal, (-1, 6, 1, 8))
    fused = keras.ops.dot_product_attention(heads, heads, heads)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(fused))
    return keras.Model(inputs, outputs), "mse", tokens, numbers.randn(24, 1).astype("float32")


def zeros(keras, numbers):
    """Inputs and biases of zeros, where activations and L1 have a kink."""
    inputs = keras.Input((4,))
    kinds = ("relu", "leaky_relu", "elu", "relu6", "hard_sigmoid", "soft_shrink")
    hidden = [keras.layers.Dense(3, kind, bias_regularizer="l1")(inputs) for kind in kinds]
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(hidden))
    x = numbers.randn(24, 4).astype("float32")
    x[::2] = 0
    return keras.Model(inputs, outputs), "mse", x, numbers.randn(24, 1).astype("float32")


def masked_and_weighted(keras, numbers):
    """Outputs with a mask, sample weights for each token: Keras multiplies these by the mask."""
    inputs = keras.Input((6,), dtype="int32")
    outputs = keras.layers.Dense(1)(keras.layers.Embedding(9, 8, mask_zero=True)(inputs))
    tokens = np.where(np.arange(6) < numbers.randint(1, 7, 24)[:, None], numbers.randint(1, 9, (24, 6)), 0)
    weights = numbers.rand(24, 6).astype("float32")
    return keras.Model(inputs, outputs), "mse", tokens, numbers.randn(24, 6, 1).astype("float32"), weights


def constants(keras, numbers):
    """Numbers that TensorFlow makes float32: of layers, activations and interpolation; a mask of whole numbers."""
    layers = keras.layers
    inputs = keras.Input((5, 6, 3))
    x = layers.Rescaling([0.1, 0.3, 0.7], [0.1, 0.2, 0.3])(inputs)
    x = layers.Normalization(mean=[0.485, 0.456, 0.406], variance=[0.229, 0.224, 0.225])(x)
    kinds = ("gelu", lambda x: keras.ops.gelu(x, approximate=True), lambda x: keras.ops.leaky_relu(x, 0.3))
    x = layers.Concatenate()([layers.Conv2D(2, 3, activation=kind)(x) for kind in kinds])
    x = layers.Concatenate()([layers.Resizing(4, 7)(x), layers.Resizing(4, 7)(layers.UpSampling2D(3)(x))])
    x = layers.UpSampling2D((3, 2), interpolation="bilinear")(x)
    first = keras.ops.transpose(x, (0, 3, 1, 2))
    x = x + keras.ops.transpose(keras.ops.image.resize(first, (12, 14), data_format="channels_first"), (0, 2, 3, 1))
    mask = keras.ops.cast(inputs[:, 0, 0, :1] > 0, "int32")
    weights = layers.Softmax(1)(layers.Dense(1)(layers.Reshape((168, 12))(x)), mask=keras.ops.expand_dims(mask, 1))
    flat = layers.Dense(168)(layers.Flatten()(x))
    x = keras.ops.stack([weights[..., 0], keras.ops.gelu(flat), keras.ops.leaky_relu(flat, 0.3)], axis=-1)
    return keras.Model(inputs, layers.Dense(1)(x)), "mse", numbers.randn(24, 5, 6, 3), numbers.randn(24, 168, 1)


def largest(keras, numbers):
    """Of numbers of which the batch's mean is taken off: XLA may compute these once more for the gradient."""
    ops = keras.ops

    class Centred(keras.layers.Layer):
        def call(self, x):
            return x - ops.mean(x, axis=0)

    inputs = keras.Input((8, 6, 1))
    x = Centred()(keras.layers.Conv2D(4, 3)(inputs))
    x = ops.concatenate([ops.max(x, axis=(1, 2)), ops.min(x, axis=[1, -2]), ops.max(ops.relu(x), axis=(1, 2))], -1)
    x = ops.concatenate([x, ops.amax(x, 1, keepdims=True)], -1)
    return keras.Model(inputs, keras.layers.Dense(1)(x)), "mse", numbers.randn(24, 8, 6, 1), numbers.randn(24, 1)


def _beside_one_another(keras, numbers, layers):
    """A model in which each layer has the images to itself: what it learns is an update that tells of that layer."""
    inputs = keras.Input((8, 8, 3))
    columns = [keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))) for layer in layers]
    x, y = numbers.rand(360, 8, 8, 3), numbers.randn(360, len(layers))
    return keras.Model(inputs, keras.layers.Concatenate()(columns)), "mse", x, y


def moved(keras, numbers):
    """Layers that move, cut or resize images, in 30 steps."""
    layers = keras.layers
    found = [layers.RandomRotation(0.3, fill_mode=mode) for mode in ("constant", "nearest", "wrap", "reflect")]
    found += [layers.RandomTranslation(0.3, 0.3), layers.RandomZoom(0.3), layers.RandomShear(0.1, 0.1)]
    found += [layers.Resizing(5, 7), layers.Resizing(5, 7, antialias=True)]
    found += [layers.UpSampling2D(2, interpolation=kind) for kind in ("nearest", "bilinear", "bicubic")]
    return _beside_one_another(keras, numbers, found)


CASES = {
    case.__name__: case
    for case in (
        probabilities, attention, zeros, masked_and_weighted,
        constants, largest, moved,
    )
}  # fmt: skip


def train(runner):
    import keras
    from learn_classes import fitted

    def result(name, is_eager):
        with runner.scope():
            numbers = np.random.RandomState(0)
            model, losses, x, y, *weights = CASES[name](keras, numbers)
            # No sigmoid near 1: float32 knows too little of 1 - p there. Softmax outputs may be as sure as they like.
            scales = {"kind": 12.0, "coded_logits": 12.0, "is": 1.0}
            for layer in model.layers:
                for weight in layer.weights[: 1 if name == "zeros" else None]:
                    weight.assign(numbers.standard_normal(weight.shape) * scales.get(layer.name, 0.4))
            if name == "probabilities":
                model.get_layer("is").bias.assign([-40.0, -2.0, -30.0])
            model.compile(
                keras.optimizers.SGD(0.01), losses, run_eagerly=is_eager, weighted_metrics=["mse"] if weights else None
            )
        before, weights = model.get_weights(), weights[0] if weights else None
        evaluated = runner.evaluate(model, x, y, sample_weight=weights)
        steps, history = fitted(runner, model, x, y, sample_weight=weights, epochs=1, shuffle=False)
        updates = [float(np.linalg.norm(own - old)) for own, old in zip(model.get_weights(), before, strict=True)]
        return {"losses": steps, "evaluated": float(np.ravel(evaluated)[0]), "updates": updates,
                "metrics": history.get("mse", [])}  # fmt: skip

    is_eager = [False, True] if runner.config.backend == "tensorflow" else [False]
    # Micro-batches of an output that carries a mask are refused, and such as mix samples.
    in_parts = runner.config.accumulate > 1 or runner.config.strategy == "pipeline"
    left_out = [
        *("constants", "moved"),  # in float32 they would show nothing
        *(["masked_and_weighted", "largest"] if in_parts else []),
    ]
    names = sys.argv[3:] or [name for name in CASES if name not in left_out]
    return {name: [result(name, each) for each in is_eager if not each or name != "moved"] for name in names}


if __name__ == "__main__":
    printed(train, sys.argv[1], **{"batch_size": 12} | json.loads(sys.argv[2]))
