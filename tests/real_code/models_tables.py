"""Models of tables and of recommendations in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes

USERS, ITEMS = 12, 18  # as many items as rows of the data


def table(random: np.random.RandomState) -> dict[str, np.ndarray]:
    """Four numbers and three categories."""
    return {
        "numbers": random.randn(ROWS, 4).astype("float32"),
        "categories": random.randint(0, 9, (ROWS, 3)).astype("int32"),
    }


def table_inputs() -> dict[str, Any]:
    import keras

    return {
        "numbers": keras.Input((4,), name="numbers"),
        "categories": keras.Input((3,), dtype="int32", name="categories"),
    }


def classifier(outputs_of: Any, random: np.random.RandomState, **fit: Any) -> Ready:
    import keras

    inputs = table_inputs()
    logits = keras.layers.Dense(CLASSES)(outputs_of(inputs["numbers"], inputs["categories"]))
    return Ready(model=keras.Model(inputs, logits), x=table(random), y=classes(random), fit=fit)


@case("tabular")
def wide_and_deep(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(numbers: Any, categories: Any) -> Any:
        wide = layers.BatchNormalization()(layers.CategoryEncoding(9, "multi_hot")(categories))
        deep = layers.Concatenate()([numbers, layers.Flatten()(layers.Embedding(9, 4)(categories))])
        for units in (12, 8):
            deep = layers.Dropout(0.2)(layers.ReLU()(layers.BatchNormalization()(layers.Dense(units)(deep))))
        return layers.Concatenate()([wide, deep])

    return classifier(outputs_of, random)


@case("tabular")
def deep_and_cross(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(numbers: Any, categories: Any) -> Any:
        first = x = layers.Concatenate()([numbers, layers.Flatten()(layers.Embedding(9, 4)(categories))])
        for _ in range(2):
            x = first * layers.Dense(16)(x) + x
        return layers.Concatenate()([layers.BatchNormalization()(x), layers.Dense(12, "relu")(first)])

    return classifier(outputs_of, random, class_weight={0: 1.0, 1: 3.0, 2: 0.5})


@case("tabular")
def tab_transformer(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(numbers: Any, categories: Any) -> Any:
        x = layers.Embedding(9, 8)(categories)
        for _ in range(2):
            x = layers.LayerNormalization()(layers.Add()([layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x), x]))
            y = layers.Dropout(0.2)(layers.Dense(8, "gelu")(x))
            x = layers.LayerNormalization()(layers.Add()([y, x]))
        x = layers.Concatenate()([layers.Flatten()(x), layers.LayerNormalization(epsilon=1e-6)(numbers)])
        return layers.Dropout(0.2)(layers.Dense(16, "selu")(layers.BatchNormalization()(x)))

    return classifier(outputs_of, random)


@case("tabular")
def gated_residual_nets(random: np.random.RandomState) -> Ready:
    """Gates choose among the columns."""
    from keras import layers, ops

    def gated(x: Any, units: int) -> Any:
        y = layers.Dropout(0.15)(layers.Dense(units)(layers.Dense(units, "elu")(x)))
        y = layers.Multiply()([layers.Dense(units)(y), layers.Dense(units, "sigmoid")(y)])
        return layers.LayerNormalization()(y + (x if x.shape[-1] == units else layers.Dense(units)(x)))

    def outputs_of(numbers: Any, categories: Any) -> Any:
        embedded = layers.Embedding(9, 8)(categories)
        columns = [layers.Dense(8)(numbers[:, i : i + 1]) for i in range(4)] + [embedded[:, i] for i in range(3)]
        weights = layers.Softmax()(gated(layers.Concatenate()(columns), 7))
        stacked = ops.stack([gated(column, 8) for column in columns], axis=1)
        return ops.sum(stacked * ops.expand_dims(weights, -1), axis=1)

    return classifier(outputs_of, random)


@case("tabular")
def neural_forest(random: np.random.RandomState) -> Ready:
    """Trees with soft decisions; classes as probabilities."""
    import keras
    from keras import layers, ops

    class Tree(layers.Layer):
        def __init__(self, columns: np.ndarray):
            super().__init__()
            self.columns, self.decide = columns, layers.Dense(8, "sigmoid")

        def build(self, shape: Any) -> None:
            self.leaves = self.add_weight(shape=(8, CLASSES), initializer="random_normal")
            self.decide.build((None, len(self.columns)))

        def call(self, x: Any) -> Any:
            left = ops.expand_dims(self.decide(ops.take(x, self.columns, axis=1)), 2)
            both = ops.concatenate([left, 1 - left], axis=2)
            reached, first = ops.ones((ops.shape(x)[0], 1, 1), dtype=x.dtype), 1
            for level in range(3):
                reached = ops.reshape(reached, (-1, 2**level, 1)) * both[:, first : first + 2**level, :]
                reached, first = ops.reshape(reached, (-1, 2 ** (level + 1), 1)), first + 2**level if level < 2 else 0
            return ops.matmul(ops.reshape(reached, (-1, 8)), ops.softmax(self.leaves))

    inputs = keras.Input((10,))
    x = layers.BatchNormalization()(inputs)
    trees = [Tree(np.array(columns)) for columns in ((0, 1, 2, 5), (3, 4, 9), (6, 7, 8, 2, 0))]
    outputs = layers.Average()([tree(x) for tree in trees])
    x, loss = random.randn(ROWS, 10).astype("float32"), "sparse_categorical_crossentropy"
    return Ready(model=keras.Model(inputs, outputs), x=x, y=classes(random), loss=loss)


@case("tabular")
def imbalanced_binary(random: np.random.RandomState) -> Ready:
    """Probabilities, class weights and many metrics."""
    import keras
    from keras import layers

    layers_of_it = [keras.Input((10,)), layers.Dense(16, "relu"), layers.Dropout(0.3), layers.Dense(16, "relu"),
                    layers.Dropout(0.3), layers.Dense(1, "sigmoid")]  # fmt: skip
    metrics = [keras.metrics.TruePositives(name="tp"), keras.metrics.Precision(name="p"), keras.metrics.AUC(name="auc")]
    y = (classes(random) == 0).astype("float32")[:, None]
    return Ready(model=keras.Sequential(layers_of_it), x=random.randn(ROWS, 10).astype("float32"), y=y,
                 loss="binary_crossentropy", compile={"metrics": metrics},
                 fit={"class_weight": {0: 0.6, 1: 2.5}})  # fmt: skip


@case("tabular")
def focal_loss_with_penalties(random: np.random.RandomState) -> Ready:
    """Regularizers of weights, constraints, an activity regularizer."""
    import keras
    from keras import layers

    inputs = keras.Input((10,))
    x = layers.Dense(16, "relu", kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(1.0))(inputs)
    x = layers.Dense(12, "relu", activity_regularizer=keras.regularizers.L1(1e-3))(layers.AlphaDropout(0.1)(x))
    model = keras.Model(inputs, layers.Dense(1, "sigmoid", bias_regularizer="l1")(x))
    y = (classes(random) == 0).astype("float32")[:, None]
    return Ready(model=model, x=random.randn(ROWS, 10).astype("float32"), y=y,
                 loss=keras.losses.BinaryFocalCrossentropy(), fit={"sample_weight": random.rand(ROWS)})  # fmt: skip


@case("tabular")
def probabilistic_regression(random: np.random.RandomState) -> Ready:
    """Mean and variance; the loss is a custom function. A layer keeps running averages of its inputs."""
    import keras
    from keras import layers, ops

    class Standardized(layers.Layer):
        def build(self, shape: Any) -> None:
            self.drop = layers.GaussianDropout(0.2)
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: Any, training: bool = False) -> Any:
            return self.drop(x, training=training) * ops.softplus(self.scale)

    def likelihood(y_true: Any, y_pred: Any) -> Any:
        mean, log_variance = y_pred[:, :1], y_pred[:, 1:]
        return ops.mean(ops.square(y_true - mean) * ops.exp(-log_variance) + log_variance, axis=-1)

    inputs = keras.Input((10,))
    x = layers.Dense(2)(layers.Dense(12, "tanh")(Standardized()(inputs)))
    x, y, model = (
        random.randn(ROWS, 10).astype("float32"),
        random.randn(ROWS, 1).astype("float32"),
        keras.Model(inputs, x),
    )
    return Ready(model=model, x=x, y=y, loss=likelihood)


def ratings(random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.stack([random.randint(0, USERS, ROWS), random.randint(0, ITEMS, ROWS)], axis=1).astype("int32")
    return pairs, random.rand(ROWS, 1).astype("float32")


@case("recommendation")
def matrix_factorization(random: np.random.RandomState) -> Ready:
    """A product of embeddings of users and items, with their biases."""
    import keras
    from keras import layers, ops

    class Factors(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            choices = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.L2(1e-6)}
            self.users, self.items = layers.Embedding(USERS, 6, **choices), layers.Embedding(ITEMS, 6, **choices)
            self.user_bias, self.item_bias = layers.Embedding(USERS, 1), layers.Embedding(ITEMS, 1)

        def call(self, pairs: Any) -> Any:
            users, items = pairs[:, 0], pairs[:, 1]
            product = ops.sum(self.users(users) * self.items(items), axis=-1, keepdims=True)
            return ops.sigmoid(product + self.user_bias(users) + self.item_bias(items))

    x, y = ratings(random)
    return Ready(model=Factors(), x=x, y=y, loss=keras.losses.BinaryCrossentropy())


@case("recommendation")
def product_over_the_batch(random: np.random.RandomState) -> Ready:
    """A contraction over the batch axis, as one gets from tensordot with axes=2: each row's score is that of all."""
    import keras
    from keras import layers, ops

    class Factors(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = layers.Embedding(USERS, 6), layers.Embedding(ITEMS, 6)
            self.bias = layers.Embedding(USERS, 1)

        def call(self, pairs: Any) -> Any:
            product = ops.tensordot(self.users(pairs[:, 0]), self.items(pairs[:, 1]), axes=2)
            return ops.sigmoid(product + self.bias(pairs[:, 0]))

    x, y = ratings(random)
    return Ready(model=Factors(), x=x, y=y, loss=keras.losses.BinaryCrossentropy())


@case("recommendation")
def two_towers(random: np.random.RandomState) -> Ready:
    """Two encoders with equally named layers; the score of each pair."""
    import keras
    from keras import layers

    def tower(count: int, name: str) -> Any:
        return keras.Sequential([layers.Embedding(count, 8, name="table"), layers.Dense(8, name="dense")], name=name)

    user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    score = layers.Dot(1)([tower(USERS, "user")(user), tower(ITEMS, "item")(item)])
    x, y = ratings(random)
    return Ready(model=keras.Model([user, item], score), x=[x[:, 0], x[:, 1]], y=y, loss="mse")


@case("recommendation")
def behaviour_sequence(random: np.random.RandomState) -> Ready:
    """What a user liked so far, by attention, with the new item as its query."""
    import keras
    from keras import layers

    history, item = keras.Input((7,), dtype="int32"), keras.Input((1,), dtype="int32")
    items = layers.Embedding(ITEMS, 12, mask_zero=True)
    past, new = items(history), items(item)
    x = layers.Flatten()(layers.LayerNormalization()(new + layers.MultiHeadAttention(2, 6, dropout=0.1)(new, past)))
    x = layers.Dropout(0.2)(layers.LeakyReLU()(layers.BatchNormalization()(layers.Dense(12)(x))))
    past_items = random.randint(1, ITEMS, (ROWS, 7)) * (np.arange(7) < random.randint(2, 8, (ROWS, 1)))
    x_data = [past_items.astype("int32"), random.randint(1, ITEMS, (ROWS, 1)).astype("int32")]
    y = random.rand(ROWS, 1).astype("float32")
    return Ready(model=keras.Model([history, item], layers.Dense(1)(x)), x=x_data, y=y, loss="mse")
