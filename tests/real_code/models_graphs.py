"""Models of graphs, sets and points in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes

NODES, WIDTH = 9, 5  # as many nodes as rows in a batch


def graphs(random: np.random.RandomState) -> list[np.ndarray]:
    """Nodes and their edges, of several sizes."""
    there = np.arange(NODES) < random.randint(4, NODES + 1, (ROWS, 1))
    edges = (random.rand(ROWS, NODES, NODES) < 0.4) | np.eye(NODES, dtype=bool)
    edges = (edges & there[:, :, None] & there[:, None, :]).astype("float32")
    return [random.randn(ROWS, NODES, WIDTH).astype("float32") * there[..., None], edges]


def of_graphs(outputs_of: Any, random: np.random.RandomState) -> Ready:
    import keras

    nodes, edges = keras.Input((NODES, WIDTH)), keras.Input((NODES, NODES))
    logits = keras.layers.Dense(CLASSES)(outputs_of(nodes, edges))
    return Ready(model=keras.Model([nodes, edges], logits), x=graphs(random), y=classes(random))


@case("graph")
def graph_convolution(random: np.random.RandomState) -> Ready:
    from keras import layers, ops

    def outputs_of(nodes: Any, edges: Any) -> Any:
        x = nodes
        for _ in range(2):
            degrees = ops.maximum(ops.sum(edges, -1, keepdims=True), 1.0)
            x = layers.Dropout(0.2)(layers.Dense(8, "relu")(ops.matmul(edges, x) / degrees))
        return layers.GlobalAveragePooling1D()(layers.BatchNormalization()(x))

    return of_graphs(outputs_of, random)


@case("graph")
def graph_attention(random: np.random.RandomState) -> Ready:
    """Scores of neighbours only; nodes without any have rows that are masked altogether."""
    from keras import layers, ops

    class Attention(layers.Layer):
        def build(self, shapes: Any) -> None:
            self.kernel = self.add_weight(shape=(shapes[0][-1], 8), initializer="glorot_uniform")
            self.scores = self.add_weight(shape=(8, 2), initializer="glorot_uniform")

        def call(self, parts: Any) -> Any:
            x, edges = ops.matmul(parts[0], self.kernel), parts[1]
            scores = ops.matmul(x, self.scores)
            scores = ops.leaky_relu(scores[:, :, :1] + ops.transpose(scores[:, :, 1:], (0, 2, 1)))
            weights = ops.softmax(ops.where(edges > 0, scores, -1e9))
            return ops.elu(ops.matmul(weights, x))

    def outputs_of(nodes: Any, edges: Any) -> Any:
        x = layers.Dropout(0.2)(Attention()([nodes, edges]))
        return layers.GlobalMaxPooling1D()(Attention()([x, edges]))

    return of_graphs(outputs_of, random)


@case("graph")
def message_passing(random: np.random.RandomState) -> Ready:
    """A GRU cell takes what neighbours send; then attention over the nodes that are there."""
    from keras import layers, ops

    class Messages(layers.Layer):
        def build(self, shapes: Any) -> None:
            self.send, self.cell = layers.Dense(WIDTH), layers.GRUCell(WIDTH)
            self.send.build((None, WIDTH))
            self.cell.build((None, WIDTH))

        def call(self, parts: Any) -> Any:
            nodes, edges = parts
            for _ in range(2):
                received = ops.reshape(ops.matmul(edges, self.send(nodes)), (-1, WIDTH))
                nodes, _ = self.cell(received, [ops.reshape(nodes, (-1, WIDTH))])
                nodes = ops.reshape(nodes, (-1, NODES, WIDTH))
            return nodes

    def outputs_of(nodes: Any, edges: Any) -> Any:
        x = Messages()([nodes, edges])
        mask = ops.expand_dims(ops.any(edges > 0, axis=-1), 1)
        y = layers.MultiHeadAttention(1, 6)(x, x, attention_mask=mask)
        return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + y))

    return of_graphs(outputs_of, random)


@case("graph")
def nodes_of_one_graph(random: np.random.RandomState) -> Ready:
    """The graph is in the model, inputs are numbers of nodes; gather, and sums by segment, alike for all rows."""
    import keras
    from keras import layers, ops

    count = ROWS  # nodes; in a batch there are half as many
    features = random.randn(count, WIDTH).astype("float32")
    sources, targets = (
        random.randint(0, count, 50).astype("int32"),
        np.sort(random.randint(0, count, 50)).astype("int32"),
    )

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.prepare, self.update = layers.Dense(8, "gelu"), layers.Dense(8, "gelu")
            self.head = layers.Dense(CLASSES)

        def call(self, indices: Any) -> Any:
            x = self.prepare(ops.cast(features, self.compute_dtype))
            sums = ops.segment_sum(ops.take(x, sources, axis=0), targets, num_segments=count)
            x = x + self.update(ops.concatenate([x, sums], axis=-1))
            return self.head(ops.take(x, indices, axis=0))

    return Ready(model=Net(), x=np.arange(ROWS).astype("int32"), y=classes(random))


@case("graph")
def nodes_of_one_graph_with_dropout(random: np.random.RandomState) -> Ready:
    """The same with dropout and batch norm over the whole graph: rows that are not the batch's."""
    import keras
    from keras import layers, ops

    count = ROWS
    features = random.randn(count, WIDTH).astype("float32")
    adjacency = (random.rand(count, count) < 0.2).astype("float32")

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.prepare, self.drop, self.norm = (
                layers.Dense(8, "gelu"),
                layers.Dropout(0.3),
                layers.BatchNormalization(),
            )
            self.head = layers.Dense(CLASSES)

        def call(self, indices: Any, training: bool = False) -> Any:
            x = self.drop(self.prepare(ops.cast(features, self.compute_dtype)), training=training)
            x = self.norm(ops.matmul(ops.cast(adjacency, x.dtype), x), training=training)
            return self.head(ops.take(x, indices, axis=0))

    return Ready(model=Net(), x=np.arange(ROWS).astype("int32"), y=classes(random))


@case("graph")
def knowledge_graph(random: np.random.RandomState) -> Ready:
    """Triples of entity, relation, entity; a margin between true and false ones."""
    import keras
    from keras import layers, ops

    inputs = keras.Input((5,), dtype="int32")  # head, relation, tail, false head, false tail
    entities, relations = layers.Embedding(14, 6), layers.Embedding(4, 6)

    def apart(head: Any, relation: Any, tail: Any) -> Any:
        return ops.sum(ops.square(entities(head) + relations(relation) - entities(tail)), -1, keepdims=True)

    true = apart(inputs[:, 0], inputs[:, 1], inputs[:, 2])
    outputs = ops.concatenate([true, apart(inputs[:, 3], inputs[:, 1], inputs[:, 4])], -1)

    def margin(y_true: Any, y_pred: Any) -> Any:
        return ops.relu(1.0 + y_pred[:, 0] - y_pred[:, 1])

    x = np.stack([random.randint(0, limit, ROWS) for limit in (14, 4, 14, 14, 14)], axis=1).astype("int32")
    return Ready(model=keras.Model(inputs, outputs), x=x, y=classes(random), loss=margin)


@case("points")
def point_net(random: np.random.RandomState) -> Ready:
    """A net turns the points first; its matrix is held near a rotation by an activity regularizer."""
    import keras
    from keras import layers, ops

    class Orthogonal(keras.regularizers.Regularizer):
        def __call__(self, x: Any) -> Any:
            x = ops.reshape(x, (-1, 3, 3))
            return ops.sum(0.001 * ops.square(ops.einsum("bij,bkj->bik", x, x) - ops.eye(3, dtype=x.dtype)))

    def shared(x: Any, filters: int) -> Any:
        return layers.ReLU()(layers.BatchNormalization(momentum=0.0)(layers.Conv1D(filters, 1)(x)))

    inputs = keras.Input((10, 3))
    x = layers.GlobalMaxPooling1D()(shared(shared(inputs, 8), 12))
    matrix = layers.Dense(9, kernel_initializer="zeros", activity_regularizer=Orthogonal())(layers.Dense(8, "relu")(x))
    x = layers.Dot((2, 1))([inputs, layers.Reshape((3, 3))(matrix)])
    x = layers.Dropout(0.3)(layers.GlobalMaxPooling1D()(shared(shared(x, 8), 12)))
    x_data = random.randn(ROWS, 10, 3).astype("float32")
    return Ready(model=keras.Model(inputs, layers.Dense(CLASSES)(x)), x=x_data, y=classes(random))


@case("points")
def point_segmentation(random: np.random.RandomState) -> Ready:
    """A class for each point, from what is near and from the whole."""
    import keras
    from keras import layers, ops

    inputs = keras.Input((10, 3))
    x = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv1D(8, 1)(inputs)))
    whole = layers.GlobalMaxPooling1D(keepdims=True)(layers.Conv1D(12, 1)(x))
    x = layers.Concatenate()([x, ops.tile(whole, (1, 10, 1))])
    model = keras.Model(inputs, layers.Conv1D(4, 1, activation="softmax")(x))
    y = np.eye(4, dtype="float32")[random.randint(0, 4, (ROWS, 10))]
    x_data = random.randn(ROWS, 10, 3).astype("float32")
    return Ready(model=model, x=x_data, y=y, loss="categorical_crossentropy")


@case("sets")
def deep_sets(random: np.random.RandomState) -> Ready:
    """Each element alone, then a sum over those that are there; elements and rows in one axis, with dropout."""
    import keras
    from keras import layers, ops

    class Elements(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.drop, self.norm = layers.Dense(8, "relu"), layers.Dropout(0.3), layers.BatchNormalization()

        def build(self, shape: Any) -> None:
            self.dense.build((None, shape[-1]))
            self.norm.build((None, 8))

        def call(self, x: Any, training: bool = False) -> Any:
            y = self.drop(self.dense(ops.reshape(x, (-1, x.shape[-1]))), training=training)
            return ops.reshape(self.norm(y, training=training), (-1, x.shape[1], 8))

    inputs = keras.Input((6, 4))
    x = ops.sum(Elements()(inputs), axis=1)
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.Dense(8, "tanh")(x)))
    return Ready(model=model, x=random.randn(ROWS, 6, 4).astype("float32"), y=classes(random))


@case("sets")
def multiple_instances(random: np.random.RandomState) -> Ready:
    """Bags of pictures; attention tells which of a bag counts; the layers are the same for each."""
    import keras
    from keras import layers, ops

    bag = [keras.Input((6, 6)) for _ in range(3)]
    dense = layers.Dense(8, "relu")
    embedded = [dense(layers.Flatten()(one)) for one in bag]
    gate, value, score = layers.Dense(6, "sigmoid"), layers.Dense(6, "tanh"), layers.Dense(1, kernel_regularizer="l2")
    weights = ops.softmax(ops.stack([score(gate(x) * value(x)) for x in embedded]), axis=0)
    x = layers.Concatenate()([weights[number] * x for number, x in enumerate(embedded)])
    model = keras.Model(bag, layers.Dense(2, "softmax")(x))
    x_data = [random.rand(ROWS, 6, 6).astype("float32") for _ in range(3)]
    y, loss = random.randint(0, 2, ROWS).astype("int32"), "sparse_categorical_crossentropy"
    return Ready(model=model, x=x_data, y=y, loss=loss)
