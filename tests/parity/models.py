"""Models of many kinds, and data for them: what people bring along. Built in every process of a comparison."""

import numpy as np


def classifier(logits_of, input_shape, optimizer="sgd"):
    import keras

    inputs = keras.Input(input_shape)
    model = keras.Model(inputs, logits_of(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(optimizer), loss, metrics=["accuracy"])
    return model


def make_optimizer(name):
    import keras

    if name == "adam":
        return keras.optimizers.Adam(0.001)
    return keras.optimizers.SGD(0.003, momentum=0.9)


def digits_model(name, optimizer):
    """One of the kit's, on the digits."""
    import keras

    import kerasdp

    data = kerasdp.load_data(kerasdp.Config())
    model = kerasdp.build_model(kerasdp.Config(model=name), data.input_shape, data.num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(optimizer), loss, metrics=["accuracy"])
    return model


def digits(count=None):
    """The first `count`, or all 1,437."""
    import kerasdp

    source = kerasdp.load_data(kerasdp.Config()).train
    indices = np.arange(count or source.num_samples)
    return source.inputs(indices), source.targets(indices)[0]


def application(name, optimizer="sgd"):
    """Of keras.applications, without pretrained weights."""
    import keras

    builder = getattr(keras.applications, name)
    model = builder(weights=None, input_shape=(32, 32, 3), classes=5, classifier_activation=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(optimizer), loss, metrics=["accuracy"])
    return model


def images():
    random = np.random.RandomState(0)
    labels = random.randint(0, 5, 150)
    x = random.randint(0, 120, (150, 32, 32, 3)) + 20 * labels[:, None, None, None]
    return x.astype("uint8"), labels


def transformer(optimizer="sgd"):
    """Embedding, attention with dropout, layer norm, GELU; padding is masked."""
    from keras import layers

    def logits_of(tokens):
        x = layers.Embedding(50, 24, mask_zero=True)(tokens)
        for _ in range(2):
            y = layers.MultiHeadAttention(3, 8, dropout=0.1)(x, x)
            x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(y)]))
            y = layers.Dense(24)(layers.Dense(48, "gelu")(x))
            x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(0.1)(y)]))
        return layers.Dense(4)(layers.GlobalAveragePooling1D()(x))

    return classifier(logits_of, (12,), optimizer)


def lstm(optimizer="sgd"):
    """Both directions, dropout between the steps."""
    from keras import layers

    def logits_of(tokens):
        x = layers.Embedding(50, 16)(tokens)
        x = layers.Bidirectional(layers.LSTM(12, dropout=0.2, recurrent_dropout=0.2, return_sequences=True))(x)
        return layers.Dense(4)(layers.LSTM(10)(x))

    return classifier(logits_of, (12,), optimizer)


def sentences():
    random = np.random.RandomState(1)
    tokens = random.randint(1, 50, (150, 12))
    tokens[np.arange(12) >= random.randint(6, 13, (150, 1))] = 0
    return tokens.astype("int32"), tokens[:, 0] % 4


def two_by_two(optimizer="sgd"):
    """Two inputs, two outputs, loss weights; batch norm in between."""
    import keras
    from keras import layers

    inputs = {"table": keras.Input((9,), name="table"), "image": keras.Input((8, 8, 3), name="image")}
    image = layers.GlobalAveragePooling2D()(layers.Conv2D(6, 3, activation="relu")(inputs["image"]))
    x = layers.Concatenate()([inputs["table"], image])
    x = layers.Activation("tanh")(layers.BatchNormalization()(layers.Dense(16)(x)))
    outputs = {"number": layers.Dense(1, name="number")(x), "kind": layers.Dense(3, name="kind")(x)}
    model = keras.Model(inputs, outputs)
    model.compile(
        make_optimizer(optimizer),
        loss={"number": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        loss_weights={"number": 0.3, "kind": 1.0},
        metrics={"number": ["mae"], "kind": ["accuracy"]},
        weighted_metrics={"number": [], "kind": ["accuracy"]},
    )
    return model


def two_by_two_data():
    """With sample weights for each output; those of `kind` weigh its classes."""
    random = np.random.RandomState(2)
    table, image = random.randn(150, 9).astype("float32"), random.rand(150, 8, 8, 3).astype("float32")
    y = {"number": table[:, :1] * 2, "kind": (table[:, 1] > 0).astype("int32") + (table[:, 2] > 1)}
    weights = {"number": random.rand(150).astype("float32"), "kind": np.array([1.0, 2.0, 4.0], "float32")[y["kind"]]}
    return {"table": table, "image": image}, y, weights
