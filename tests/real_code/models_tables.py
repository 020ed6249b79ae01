"""Models of tables and of recommendations in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes

USERS, ITEMS = 12, 18  # as many items as rows of the data


@case("tabular")
def wide_and_deep(random: np.random.RandomState) -> Ready:
    """Of four numbers and three categories."""
    import keras
    from keras import layers

    numbers, categories = keras.Input((4,), name="numbers"), keras.Input((3,), dtype="int32", name="categories")
    wide = layers.BatchNormalization()(layers.CategoryEncoding(9, "multi_hot")(categories))
    deep = layers.Concatenate()([numbers, layers.Flatten()(layers.Embedding(9, 4)(categories))])
    for units in (12, 8):
        deep = layers.Dropout(0.2)(layers.ReLU()(layers.BatchNormalization()(layers.Dense(units)(deep))))
    inputs = {"numbers": numbers, "categories": categories}
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.Concatenate()([wide, deep])))
    x = {
        "numbers": random.randn(ROWS, 4).astype("float32"),
        "categories": random.randint(0, 9, (ROWS, 3)).astype("int32"),
    }
    return Ready(model=model, x=x, y=classes(random))


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

    x = np.stack([random.randint(0, USERS, ROWS), random.randint(0, ITEMS, ROWS)], axis=1).astype("int32")
    y = random.rand(ROWS, 1).astype("float32")
    return Ready(model=Factors(), x=x, y=y, loss=keras.losses.BinaryCrossentropy())
