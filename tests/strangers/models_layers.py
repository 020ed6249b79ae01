"""Layers of packages from PyPI, in a small model of keras layers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes, images, rows, series

KIND = "layers of packages"


def between(
    name: str, build: Callable[[], Any], make_x: Callable[[np.random.RandomState], Any], draws: bool = False
) -> None:
    """A layer, or several, in front of logits."""

    @case(KIND, name, draws)
    def make(random: np.random.RandomState) -> Ready:
        import keras

        x = make_x(random)
        inputs = keras.Input(x.shape[1:])
        outputs = inputs
        for layer in keras.tree.flatten(build()):
            outputs = layer(outputs)
        if len(outputs.shape) > 2:
            outputs = keras.layers.Flatten()(outputs)
        return Ready(model=keras.Model(inputs, keras.layers.Dense(CLASSES)(outputs)), x=x, y=classes(random))


def layer(path: str, *arguments: Any, **choices: Any) -> Callable[[], Any]:
    def build() -> Any:
        import importlib

        module, name = path.split(":")
        return getattr(importlib.import_module(module), name)(*arguments, **choices)

    return build


def spectral(mode: str) -> Callable[[], Any]:
    def build() -> Any:
        import keras
        import keras_proba.layers

        dense = keras.layers.Dense(8)
        return [keras_proba.layers.SpectralNormalization(dense, norm_multiplier=0.5, mode=mode)]

    return build


def lmu() -> Any:
    import keras
    import keras_lmu

    return keras_lmu.LMU(memory_d=2, order=4, theta=6, hidden_cell=keras.layers.SimpleRNNCell(5))


def convolutional_attention() -> Any:
    import keras
    import kerex.layers

    return kerex.layers.CBAM(keras.layers.Conv2D(16, 3))


between("mingru-keras MinGRU", layer("mingru_keras:MinGRU", 6), series)
between("keras-efficient-kan KANLinear", layer("keras_efficient_kan:KANLinear", 6), rows)
between("keras-sig SigLayer", layer("keras_sig:SigLayer", 3), series)
between("keras-lmu LMU", lmu, series)
between("keras-matmulless GRUMML", layer("keras_mml.layers:GRUMML", 6), series)
between("keras-matmulless DenseMML", layer("keras_mml.layers:DenseMML", 6), rows)
between("keras-proba projection", spectral("projection"), rows)
between("keras-proba reparameterization", spectral("reparameterization"), rows)
between("keras-proba DenseFlipout", layer("keras_proba.layers:DenseFlipout", 6, kl_weight=0.01), rows, True)
between("keras-proba local reparameterization", layer("keras_proba.layers:DenseLocalReparameterization", 6), rows, True)
between("hgq2 QDense", layer("hgq.layers:QDense", 6), rows)
between("hgq2 QBatchNormalization", layer("hgq.layers:QBatchNormalization"), rows)
between("hgq2 QEinsumDenseBatchnorm", layer("hgq.layers:QEinsumDenseBatchnorm", "bc,cd->bd", 6, bias_axes="d"), rows)
between("kerex CBAM", convolutional_attention, lambda random: images(random, 8))
between("kerex FNO2D", layer("kerex.layers:FNO2D", 4, (3, 3)), lambda random: images(random, 8))
between("keras-complex ComplexDense", layer("complexnn:ComplexDense", 4), rows)
between("mono-dense-keras", layer("mono_dense_keras:MonoDense", 6, activation="relu"), rows)
between("kerasfactory experts", layer("kerasfactory.layers:TabularMoELayer", 3, 6), rows)
between("kerasfactory distributions", layer("kerasfactory.layers:DistributionAwareEncoder"), rows, True)
between("kerasfactory RowAttention", layer("kerasfactory.layers:RowAttention", 6), rows)
between("kerasfactory anomalies", layer("kerasfactory.layers:NumericalAnomalyDetection", [4]), rows)
between("keras-aug color", layer("keras_aug.layers.vision:ColorJitter", brightness=0.3),
        lambda random: images(random, 8), True)  # fmt: skip
between("k3-node PairNorm", layer("k3_node.layers:PairNorm"), rows)
between("k3-node BatchNorm", layer("k3_node.layers:BatchNorm", 6), rows)
between("k3-node GraphNorm", layer("k3_node.layers:GraphNorm", 6), rows)


@case(KIND, "keras-proba Gaussian process")
def gaussian_process(random: np.random.RandomState) -> Ready:
    """Adds up a precision matrix over the batches; a callback resets it before each epoch."""
    import keras
    import keras_proba.callbacks
    import keras_proba.layers

    inputs = keras.Input((6,))
    x = keras.layers.Dense(5, "tanh")(inputs)
    logits, covariance = keras_proba.layers.RandomFeatureGaussianProcess(CLASSES, num_inducing=8)(x)
    # The covariance is for inference; in training it is the identity.
    return Ready(model=keras.Model(inputs, logits), x=rows(random), y=classes(random),
                 fit={"callbacks": [keras_proba.callbacks.ResetCovarianceCallback()]})  # fmt: skip


@case(KIND, "keras-proba discounted precision")
def discounted_precision(random: np.random.RandomState) -> Ready:
    """As above, within a model, so that it is called in training; discounted by the batch."""
    import keras
    import keras_proba.layers

    class Process(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.process = keras_proba.layers.RandomFeatureGaussianProcess(CLASSES, num_inducing=8, gp_cov_momentum=0.9)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.process(x, training=training)[0]

    return Ready(model=Process(), x=rows(random), y=classes(random))


def graph(name: str, build: Callable[[], Any]) -> None:
    """A layer of graphs gets nodes and neighbours of each sample: (rows, nodes, features), (rows, nodes, nodes)."""

    @case(KIND, name)
    def make(random: np.random.RandomState) -> Ready:
        import keras

        nodes, neighbours = keras.Input((5, 4)), keras.Input((5, 5))
        x = keras.layers.GlobalAveragePooling1D()(build()([nodes, neighbours]))
        model = keras.Model([nodes, neighbours], keras.layers.Dense(CLASSES)(x))
        adjacency = (random.rand(ROWS, 5, 5) > 0.5).astype("float32")
        return Ready(model=model, x=[series(random, 5), adjacency], y=classes(random))


graph("spektral GCNConv", layer("spektral.layers:GCNConv", 6))
graph("spektral GATConv", layer("spektral.layers:GATConv", 6, dropout_rate=0.0))


@case(KIND, "keras-geometric one graph")
def one_graph(random: np.random.RandomState) -> Ready:
    """Each row is a node of one graph, whose edges name rows of the batch."""
    import keras
    import keras_geometric.layers

    class Nodes(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.dense = keras_geometric.layers.GCNConv(6), keras.layers.Dense(CLASSES)

        def call(self, x: Any) -> Any:
            edges = keras.ops.stack([keras.ops.arange(9), (keras.ops.arange(9) + 1) % 9])
            return self.dense(self.convolution([x, edges]))

    return Ready(model=Nodes(), x=rows(random), y=classes(random))


@case(KIND, "coral-ordinal")
def ordinal(random: np.random.RandomState) -> Ready:
    import coral_ordinal
    import keras

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), coral_ordinal.CoralOrdinal(CLASSES)])
    return Ready(model=model, x=rows(random), y=classes(random), loss=coral_ordinal.OrdinalCrossEntropy(CLASSES),
                 compile={"metrics": [coral_ordinal.MeanAbsoluteErrorLabels()]})  # fmt: skip


@case(KIND, "kerasfactory metrics")
def metrics(random: np.random.RandomState) -> Ready:
    """A median and a deviation, which no sums over the devices give."""
    import keras
    import kerasfactory.metrics

    class Deviation(kerasfactory.metrics.StandardDeviation):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(y_pred)

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    return Ready(model=model, x=rows(random), y=random.randn(ROWS, 1).astype("float32"), loss="mse",
                 compile={"metrics": [Deviation()]})  # fmt: skip
