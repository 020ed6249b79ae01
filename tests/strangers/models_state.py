"""Layers, losses and metrics that keep something between the batches, as people write them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes, images, rows, series

KIND = "state"
WIDTH = 5


def keeps(name: str, shape: tuple[int, ...], initial: str = "zeros") -> Callable[..., Any]:
    """Registers `step(state, x)`, which returns the new state and the outputs: a layer with a variable."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        @case(KIND, name)
        def make(random: np.random.RandomState) -> Ready:
            import keras

            class Keeps(keras.layers.Layer):
                def build(self, input_shape: Any) -> None:
                    self.state = self.add_weight(shape=shape, initializer=initial, trainable=False, name="state")

                def call(self, x: Any, training: bool = False) -> Any:
                    # A copy: torch assigns in place, and its gradients need what was there.
                    state, outputs = step(keras.ops, 1.0 * self.state, x)
                    if training:
                        self.state.assign(keras.ops.stop_gradient(state))
                    return outputs

            inputs = keras.Input((6,))
            x = Keeps()(keras.layers.Dense(WIDTH, "tanh")(inputs))
            return Ready(model=keras.Model(inputs, keras.layers.Dense(CLASSES)(x)), x=rows(random), y=classes(random))

        return step

    return register


@keeps("running maxima", (WIDTH,), "ones")
def maxima(ops: Any, state: Any, x: Any) -> Any:
    state = ops.maximum(0.9 * state, ops.max(ops.abs(x), axis=0))
    return state, x / ops.stop_gradient(state)


@keeps("scaler by running means", (2, WIDTH), "ones")
def scaler(ops: Any, state: Any, x: Any) -> Any:
    mean, square = ops.mean(x, axis=0), ops.mean(ops.square(x), axis=0)
    new = 0.9 * state + 0.1 * ops.stack([mean, square])
    return new, (x - state[0]) / ops.sqrt(ops.abs(state[1]) + 0.1)


@keeps("averaged codebook", (4, WIDTH), "orthogonal")
def codebook(ops: Any, state: Any, x: Any) -> Any:
    """Codes move towards the mean of the rows that chose them; a row becomes its code."""
    distances = ops.sum(ops.square(x[:, None] - state[None]), axis=-1)
    chosen = ops.one_hot(ops.argmin(distances, axis=-1), 4, dtype=x.dtype)
    counts = ops.sum(chosen, axis=0)[:, None]
    means = ops.matmul(ops.transpose(chosen), x) / ops.maximum(counts, 1.0)
    return ops.where(counts > 0, 0.9 * state + 0.1 * means, state), x + ops.stop_gradient(ops.matmul(chosen, state) - x)


@keeps("k-means", (3, WIDTH), "orthogonal")
def k_means(ops: Any, state: Any, x: Any) -> Any:
    """Soft distances to centroids, which are the means of the rows nearest to each."""
    distances = ops.sum(ops.square(x[:, None] - ops.stop_gradient(state)[None]), axis=-1)
    nearest = ops.one_hot(ops.argmin(distances, axis=-1), 3, dtype=x.dtype)
    counts = ops.sum(nearest, axis=0)[:, None]
    means = ops.matmul(ops.transpose(nearest), x) / ops.maximum(counts, 1.0)
    return ops.where(counts > 0, means, state), ops.softmax(-distances)


@keeps("queue of keys", (12, WIDTH), "orthogonal")
def queue(ops: Any, state: Any, x: Any) -> Any:
    """MoCo's: the newest rows in front, the oldest out; similarities to all of them."""
    return ops.concatenate([x, state])[:12], ops.matmul(x, ops.transpose(ops.stop_gradient(state)))


@keeps("counted steps", ())
def counted(ops: Any, state: Any, x: Any) -> Any:
    """Knows of no rows: a factor that grows with the steps."""
    return state + 1, x * (1 + 0.1 * state)


@keeps("counted rows", ())
def counted_rows(ops: Any, state: Any, x: Any) -> Any:
    return state + ops.cast(ops.shape(x)[0], "float32"), x * (1 + 0.01 * state)


@keeps("load of experts", (WIDTH,))
def balanced(ops: Any, state: Any, x: Any) -> Any:
    """A bias that is lowered for the units that most rows choose, without a loss for it."""
    chosen = ops.one_hot(ops.argmax(x + state, axis=-1), WIDTH, dtype=x.dtype)
    load = ops.mean(chosen, axis=0)
    return state + 0.1 * ops.sign(1 / WIDTH - load), x * chosen


@keeps("hebbian traces", (WIDTH, WIDTH))
def traces(ops: Any, state: Any, x: Any) -> Any:
    new = 0.9 * state + 0.1 * ops.matmul(ops.transpose(x), x) / ops.cast(ops.shape(x)[0], x.dtype)
    return new, x + 0.5 * ops.matmul(x, state)


@keeps("last row", (WIDTH,))
def last_row(ops: Any, state: Any, x: Any) -> Any:
    return x[-1], x - ops.stop_gradient(state)


@case(KIND, "stateful GRU")
def stateful_recurrent(random: np.random.RandomState) -> Ready:
    """Each row of a batch continues the same row of the batch before."""
    import keras

    inputs = keras.Input((4, 3), batch_size=9)
    x = keras.layers.GRU(WIDTH, stateful=True)(inputs)
    return Ready(model=keras.Model(inputs, keras.layers.Dense(CLASSES)(x)), x=series(random, 4, 3), y=classes(random))


@case(KIND, "cell with a counter")
def counting_cell(random: np.random.RandomState) -> Ready:
    """A custom cell in keras.layers.RNN."""
    import keras
    from keras import ops

    class Cell(keras.layers.Layer):
        state_size = WIDTH

        def build(self, input_shape: Any) -> None:
            self.dense = keras.layers.Dense(WIDTH)
            self.dense.build((None, input_shape[-1] + WIDTH))

        def call(self, x: Any, states: Any, training: bool = False) -> Any:
            new = ops.tanh(self.dense(ops.concatenate([x, states[0]], axis=-1)))
            return new, [new]

    inputs = keras.Input((4, 3))
    x = keras.layers.RNN(Cell())(inputs)
    return Ready(model=keras.Model(inputs, keras.layers.Dense(CLASSES)(x)), x=series(random, 4, 3), y=classes(random))


def loss_case(name: str) -> Callable[..., Any]:
    def register(make_loss: Callable[[], Any]) -> Callable[..., Any]:
        @case(KIND, name)
        def make(random: np.random.RandomState) -> Ready:
            import keras

            model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(CLASSES)]
            )
            return Ready(model=model, x=rows(random), y=random.rand(ROWS, CLASSES).astype("float32"), loss=make_loss())

        return make_loss

    return register


@loss_case("DINO's centre")
def centre() -> Any:
    """The teacher's outputs less their running mean, which is a variable of the loss."""
    import keras
    from keras import ops

    class Dino(keras.losses.Loss):
        def __init__(self) -> None:
            super().__init__()
            self.centre = keras.Variable(np.zeros(CLASSES, "float32"), trainable=False)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            teacher = ops.softmax((y_true - self.centre) / 0.1)
            self.centre.assign(0.9 * self.centre + 0.1 * ops.mean(y_true, axis=0))
            return -ops.sum(teacher * ops.log_softmax(y_pred), axis=-1)

    return Dino()


@loss_case("loss that counts its steps")
def annealed() -> Any:
    import keras
    from keras import ops

    class Annealed(keras.losses.Loss):
        def __init__(self) -> None:
            super().__init__()
            self.steps = keras.Variable(0.0, trainable=False)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            self.steps.assign(self.steps + 1.0)
            return ops.mean(ops.square(y_true - y_pred), axis=-1) * (1.0 + self.steps)

    return Annealed()


@loss_case("loss of the largest error")
def largest() -> Any:
    """No mean over the rows."""
    from keras import ops

    return lambda y_true, y_pred: ops.max(ops.square(y_true - y_pred))


@loss_case("errors in standard deviations")
def deviations() -> Any:
    """Divides by the deviation of the batch."""
    from keras import ops

    return lambda y_true, y_pred: ops.mean(ops.square((y_true - y_pred) / ops.std(y_true, axis=0)), axis=-1)


@case(KIND, "metrics with a state of their own")
def metrics(random: np.random.RandomState) -> Ready:
    """The largest error so far, a running mean by the batch, and a matrix of counts."""
    import keras
    from keras import ops

    class Kept(keras.metrics.Metric):
        def __init__(self, name: str, step: Callable[..., Any]) -> None:
            super().__init__(name=name)
            self.step, self.value = step, self.add_weight(shape=(), initializer="zeros", name="value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            errors = ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred[:, 0])
            self.value.assign(self.step(self.value, errors))

        def result(self) -> Any:
            return 1.0 * self.value

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES)])
    kept = [Kept("largest", lambda value, errors: ops.maximum(value, ops.max(errors))),
            Kept("running", lambda value, errors: 0.9 * value + 0.1 * ops.mean(errors)),
            Kept("total", lambda value, errors: value + ops.sum(errors))]  # fmt: skip
    return Ready(model=model, x=rows(random), y=classes(random), compile={"metrics": kept})


@case(KIND, "ghost batch norm")
def ghost(random: np.random.RandomState) -> Ready:
    """Statistics of three rows each, with running means of its own."""
    import keras
    from keras import ops

    class Ghost(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.mean = self.add_weight(shape=(input_shape[-1],), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                return x - self.mean
            parts = ops.reshape(x, (-1, 3, x.shape[-1]))
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            return ops.reshape(parts - ops.mean(parts, axis=1, keepdims=True), (-1, x.shape[-1]))

    inputs = keras.Input((6,))
    x = Ghost()(keras.layers.Dense(WIDTH)(inputs))
    return Ready(model=keras.Model(inputs, keras.layers.Dense(CLASSES)(x)), x=rows(random), y=classes(random))


@case(KIND, "batch norm by hand")
def batch_norm(random: np.random.RandomState) -> Ready:
    import keras
    from keras import ops

    class Norm(keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.mean = self.add_weight(shape=(input_shape[-1],), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            mean = ops.mean(x, axis=(0, 1, 2)) if training else self.mean
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * mean)
            return x - mean

    inputs = keras.Input((8, 8, 3))
    x = keras.layers.GlobalMaxPooling2D()(Norm()(keras.layers.Conv2D(4, 3)(inputs)))
    return Ready(model=keras.Model(inputs, keras.layers.Dense(CLASSES)(x)), x=images(random, 8), y=classes(random))
