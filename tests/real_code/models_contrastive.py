"""Models that learn by comparing, and models with unusual parts."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes, images

WIDTH = 8


def encoder() -> Any:
    import keras
    from keras import layers

    return keras.Sequential([layers.Conv2D(6, 3, strides=2, activation="relu"), layers.BatchNormalization(),
                             layers.Flatten(), layers.Dropout(0.2), layers.Dense(WIDTH)])  # fmt: skip


def unit(x: Any) -> Any:
    from keras import ops

    return x / ops.sqrt(ops.maximum(ops.sum(ops.square(x), -1, keepdims=True), 1e-6))


@case("contrastive")
def siamese_net(random: np.random.RandomState) -> Ready:
    """Pairs of images; a margin on their distance."""
    import keras
    from keras import layers, ops

    def contrastive(y_true: Any, y_pred: Any) -> Any:
        return (1 - y_true) * ops.square(y_pred) + y_true * ops.square(ops.maximum(1.0 - y_pred, 0.0))

    left, right, shared = keras.Input((12, 12, 1)), keras.Input((12, 12, 1)), encoder()
    squares = ops.sum(ops.square(shared(left) - shared(right)), axis=1, keepdims=True)
    x = layers.BatchNormalization()(ops.sqrt(ops.maximum(squares, 1e-7)))
    model = keras.Model([left, right], layers.Dense(1, activation="sigmoid")(x))
    y = random.randint(0, 2, (ROWS, 1)).astype("float32")
    return Ready(model=model, x=[images(random, 12, 1), images(random, 12, 1)], y=y, loss=contrastive)


@case("contrastive")
def triplets_in_compute_loss(random: np.random.RandomState) -> Ready:
    """Anchor, positive, negative through one encoder; no targets."""
    import keras
    from keras import ops

    class Triplets(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

        def call(self, x: Any, training: bool = False) -> Any:
            anchor, positive, negative = (self.encoder(part, training=training) for part in x)
            return ops.stack([ops.sum(ops.square(anchor - other), -1) for other in (positive, negative)], -1)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ANN001, ANN201
            return ops.mean(ops.maximum(y_pred[:, 0] - y_pred[:, 1] + 0.5, 0.0))

    return Ready(model=Triplets(), x=[images(random, 12, 1) for _ in range(3)], loss="mse")


@case("contrastive")
def two_views_loss_function(random: np.random.RandomState) -> Ready:
    """Each image's two views against all others of the batch (SimCLR), as a loss function on both embeddings."""
    import keras
    from keras import layers, ops

    def loss(y_true: Any, y_pred: Any) -> Any:
        first, second = unit(y_pred[:, :WIDTH]), unit(y_pred[:, WIDTH:])
        similarities = ops.matmul(first, ops.transpose(second)) / 0.5
        labels = ops.arange(ops.shape(similarities)[0])
        one_way = keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
        other = keras.losses.sparse_categorical_crossentropy(labels, ops.transpose(similarities), from_logits=True)
        return (one_way + other) / 2

    inputs, shared = keras.Input((12, 12, 1)), encoder()
    views = [layers.RandomFlip()(inputs), layers.RandomContrast(0.3)(inputs)]
    model = keras.Model(inputs, layers.Concatenate()([shared(view) for view in views]))
    return Ready(model=model, x=images(random, 12, 1), y=classes(random), loss=loss)


@case("contrastive")
def two_views_compute_loss(random: np.random.RandomState) -> Ready:
    """The same in the model's compute_loss, which sees the outputs of the global batch."""
    import keras
    from keras import layers, ops

    class Views(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.noise, self.encoder, self.projection = layers.GaussianNoise(0.2), encoder(), layers.Dense(6)

        def call(self, x: Any, training: bool = False) -> Any:
            views = [self.noise(x, training=True), x]
            return [unit(self.projection(self.encoder(view, training=training))) for view in views]

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ANN001, ANN201
            similarities = ops.matmul(y_pred[0], ops.transpose(y_pred[1])) / 0.5
            labels = ops.arange(ops.shape(similarities)[0])
            return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True))

    return Ready(model=Views(), x=images(random, 12, 1), y=classes(random), loss="mse")


@case("contrastive")
def supervised_contrastive(random: np.random.RandomState) -> Ready:
    """Rows of one class are drawn together, over the whole batch, by a custom Loss."""
    import keras
    from keras import ops

    class Supervised(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            y_true = ops.reshape(y_true, (-1, 1))
            similarities = ops.matmul(unit(y_pred), ops.transpose(unit(y_pred)))
            same = ops.cast(ops.equal(y_true, ops.transpose(y_true)), similarities.dtype)
            return -ops.sum(same * ops.log_softmax(similarities), -1) / ops.sum(same, -1)

    inputs = keras.Input((12, 12, 1))
    model = keras.Model(inputs, encoder()(inputs))
    return Ready(model=model, x=images(random, 12, 1), y=classes(random), loss=Supervised())


@case("contrastive")
def distillation(random: np.random.RandomState) -> Ready:
    """A frozen teacher within the student's model; compute_loss takes both."""
    import keras
    from keras import layers, ops

    class Distiller(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = keras.Sequential([encoder(), layers.Dense(CLASSES)])
            self.teacher.trainable = False
            self.student = keras.Sequential([layers.Flatten(), layers.Dropout(0.2), layers.Dense(CLASSES)])

        def call(self, x: Any, training: bool = False) -> Any:
            return self.student(x, training=training), self.teacher(x, training=False)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ANN001, ANN201
            student, teacher = y_pred
            hard = keras.losses.sparse_categorical_crossentropy(y, student, from_logits=True)
            soft = keras.losses.kl_divergence(ops.softmax(teacher / 3), ops.softmax(student / 3))
            return ops.mean(0.3 * hard + 0.7 * soft)

    return Ready(model=Distiller(), x=images(random, 12, 1), y=classes(random), loss="mse")


@case("unusual parts")
def spectral_norm(random: np.random.RandomState) -> Ready:
    """Wrapped layers whose vectors change at each step."""
    import keras
    from keras import layers

    inputs = keras.Input((12, 12, 1))
    x = layers.LeakyReLU()(layers.SpectralNormalization(layers.Conv2D(6, 3, strides=2))(inputs))
    model = keras.Model(inputs, layers.SpectralNormalization(layers.Dense(CLASSES))(layers.Flatten()(x)))
    return Ready(model=model, x=images(random, 12, 1), y=classes(random))


@case("unusual parts")
def layer_with_state(random: np.random.RandomState) -> Ready:
    """A layer counts its calls, and a weight that is not trained changes with the count."""
    import keras
    from keras import layers, ops

    class Warming(layers.Layer):
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.count.assign(self.count + 1)
            return x * self.scale * ops.minimum(self.count / 4, 1.0)

    inputs = keras.Input((12, 12, 1))
    model = keras.Model(inputs, layers.Dense(CLASSES)(Warming()(layers.Dense(8, "tanh")(layers.Flatten()(inputs)))))
    return Ready(model=model, x=images(random, 12, 1), y=classes(random))


@case("unusual parts")
def branches_that_share_weights(random: np.random.RandomState) -> Ready:
    """One layer called three times, a nested model within a nested model, a layer that is never called."""
    import keras
    from keras import layers, ops

    inner = keras.Sequential([layers.Dense(8, "relu"), layers.LayerNormalization()])

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unused, self.head = inner, layers.Dense(3), layers.Dense(CLASSES)

        def call(self, x: Any) -> Any:
            y = self.inner(x)
            return self.head(y + self.inner(ops.flip(y, axis=1)) + self.inner(2 * y))

    return Ready(model=Outer(), x=random.randn(ROWS, 8).astype("float32"), y=classes(random))


@case("unusual parts")
def transfer_with_frozen_base(random: np.random.RandomState) -> Ready:
    """The base is frozen, batch norm and all; only the head learns."""
    import keras
    from keras import layers

    base = keras.Sequential([keras.Input((12, 12, 3)), layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU()])
    base.trainable = False
    inputs = keras.Input((12, 12, 3))
    x = layers.GlobalAveragePooling2D()(base(layers.Rescaling(2.0, -1.0)(inputs), training=False))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.Dropout(0.2)(x)))
    return Ready(model=model, x=images(random, 12), y=classes(random))


@case("unusual parts")
def weights_made_by_a_net(random: np.random.RandomState) -> Ready:
    """The kernel of a layer is what another layer makes of each row (a hypernetwork)."""
    import keras
    from keras import layers, ops

    inputs, codes = keras.Input((6,)), keras.Input((4,))
    kernel = ops.reshape(layers.Dense(6 * CLASSES)(layers.Dense(8, "relu")(codes)), (-1, 6, CLASSES))
    model = keras.Model([inputs, codes], ops.einsum("bi,bio->bo", layers.Dropout(0.1)(inputs), kernel))
    x = [random.randn(ROWS, 6).astype("float32"), random.randn(ROWS, 4).astype("float32")]
    return Ready(model=model, x=x, y=classes(random))
