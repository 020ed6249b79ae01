"""Networks of packages from PyPI that people use with Keras 3, small and without weights."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes, images, series

KIND = "networks of packages"


def image_net(name: str, build: Callable[[], Any], size: int = 32, scale: float = 1.0, draws: bool = False) -> None:
    @case(KIND, name, draws)
    def make(random: np.random.RandomState) -> Ready:
        return Ready(model=build(), x=images(random, size) * scale, y=classes(random))


def kimm(name: str) -> Callable[[], Any]:
    def build() -> Any:
        import kimm.models

        return getattr(kimm.models, name)(
            input_shape=(32, 32, 3), include_preprocessing=False, weights=None, classes=CLASSES,
            classifier_activation=None)  # fmt: skip

    return build


def k3im(module: str, function: str, **choices: Any) -> Callable[[], Any]:
    def build() -> Any:
        import importlib

        import keras

        model = getattr(importlib.import_module(f"k3im.{module}"), function)(num_classes=CLASSES, **choices)
        inputs = keras.Input((32, 32, 3))
        return keras.Model(inputs, model(inputs))

    return build


image_net("kimm LCNet035", kimm("LCNet035"))
image_net("k3im ConvMixer", k3im("convmixer", "ConvMixer", filters=16, depth=2))


@case(KIND, "medicai UNet")
def medicai_unet(random: np.random.RandomState) -> Ready:
    """Dice is a ratio of sums over each mask, and its metric one over all of them."""
    import medicai.losses
    import medicai.metrics
    import medicai.models

    model = medicai.models.UNet(input_shape=(32, 32, 3), encoder_name="resnet18", encoder_depth=3,
                                decoder_filters=(16, 8, 8), num_classes=1)  # fmt: skip
    masks = (random.rand(ROWS, 32, 32, 1) > 0.5).astype("float32")
    metric = medicai.metrics.BinaryDiceMetric(from_logits=False, num_classes=1)
    loss = medicai.losses.BinaryDiceCELoss(from_logits=False, num_classes=1)
    return Ready(model=model, x=images(random), y=masks, loss=loss, compile={"metrics": [metric]})


@case(KIND, "medicai generalized dice")
def generalized_dice(random: np.random.RandomState) -> Ready:
    """Its weights are those of the classes in the batch."""
    import keras
    import medicai.losses

    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(CLASSES, 3, padding="same")])
    loss = medicai.losses.SparseGeneralizedDiceLoss(from_logits=True, num_classes=CLASSES)
    masks = random.randint(0, CLASSES, (ROWS, 8, 8, 1)).astype("int32")
    return Ready(model=model, x=images(random, 8), y=masks, loss=loss)


@case(KIND, "keras-sciml FNO2D")
def fourier_operator(random: np.random.RandomState) -> Ready:
    from keras_sciml.models import FNO2D

    return Ready(model=FNO2D(modes=3, width=6, depth=2, out_channels=1, projection_dim=8),
                 x=images(random, 8, 2), y=images(random, 8, 1), loss="mse")  # fmt: skip


@case(KIND, "keras-sciml DeepONet")
def deep_operator(random: np.random.RandomState) -> Ready:
    """Its trunk reads the points at which all functions of the batch are asked for."""
    from keras_sciml.models import DeepONet

    model = DeepONet(latent_dim=6, mode="pointwise", branch_input_dim=5, trunk_input_dim=2, hidden_layers=1)
    x = [random.randn(ROWS, 5).astype("float32"), random.rand(ROWS, 2).astype("float32")]
    return Ready(model=model, x=x, y=random.randn(ROWS, 1).astype("float32"), loss="mse")


@case(KIND, "keras-tcn TCN")
def temporal_convolutions(random: np.random.RandomState) -> Ready:
    import keras
    import tcn

    inputs = keras.Input((12, 4))
    x = tcn.TCN(6, dilations=(1, 2, 4), use_batch_norm=True)(inputs)
    return Ready(model=keras.Model(inputs, keras.layers.Dense(CLASSES)(x)), x=series(random), y=classes(random))


@case(KIND, "keras-mdn-layer")
def mixture_density(random: np.random.RandomState) -> Ready:
    import keras
    import keras_mdn_layer

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras_mdn_layer.MDN(2, 3)])
    y = random.randn(ROWS, 2).astype("float32")
    return Ready(model=model, x=series(random)[:, 0], y=y, loss=keras_mdn_layer.get_mixture_loss_func(2, 3))


@case(KIND, "kerasfactory TSMixer")
def mixer(random: np.random.RandomState) -> Ready:
    """Normalizes each series, and the output back, by attributes that a layer's call sets."""
    from kerasfactory.models.TSMixer import TSMixer

    model = TSMixer(seq_len=12, pred_len=3, n_features=4, n_blocks=1, ff_dim=8, dropout=0.0)
    return Ready(model=model, x=series(random), y=series(random, 3), loss="mse")


@case(KIND, "keras-rs two towers")
def two_towers(random: np.random.RandomState) -> Ready:
    """Each query against all items of the batch, less how often they are drawn."""
    import keras
    import keras_rs
    from keras import ops

    class Towers(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = keras.layers.Embedding(20, 6), keras.layers.Embedding(30, 6)
            self.correct = keras_rs.layers.SamplingProbabilityCorrection()

        def call(self, inputs: Any) -> Any:
            return self.users(inputs["user"]), self.items(inputs["item"])

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ANN001, ANN201
            scores = ops.matmul(y_pred[0], ops.transpose(y_pred[1]))
            scores = self.correct(scores, ops.full((ops.shape(scores)[0],), 1 / 30))
            labels = ops.arange(ops.shape(scores)[0])
            return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True))

    x = {"user": random.randint(0, 20, ROWS), "item": random.randint(0, 30, ROWS)}
    return Ready(model=Towers(), x=x, y=np.zeros(ROWS, "float32"), loss="mse")


@case(KIND, "keras-rs ranking")
def ranking(random: np.random.RandomState) -> Ready:
    """Deep and cross, with a loss and a metric on lists."""
    import keras
    import keras_rs

    inputs = keras.Input((8,))
    x = keras_rs.layers.FeatureCross(projection_dim=4)(inputs)
    x = keras_rs.layers.FeatureCross()(inputs, x)
    model = keras.Model(inputs, keras.layers.Dense(5)(x))
    return Ready(model=model, x=random.randn(ROWS, 8).astype("float32"),
                 y=random.randint(0, 4, (ROWS, 5)).astype("float32"), loss=keras_rs.losses.PairwiseHingeLoss(),
                 compile={"metrics": [keras_rs.metrics.NDCG(k=3)]})  # fmt: skip


# The last: bayesflow turns off gradients on torch when it is imported, and on in its own step.
@case(KIND, "bayesflow CouplingFlow")
def coupling_flow(random: np.random.RandomState) -> Ready:
    """Standardizes by running means, with a train_step of its own."""
    import bayesflow
    import keras

    approximator = bayesflow.approximators.ContinuousApproximator(
        inference_network=bayesflow.networks.CouplingFlow(depth=2, subnet_kwargs={"widths": (8,), "dropout": 0.0}),
        summary_network=bayesflow.networks.DeepSet(summary_dim=3, embed_dim=4, depth=1, mlp_widths=(8,), dropout=0.0),
    )
    data = {
        "inference_variables": random.randn(ROWS, 2).astype("float32"),
        "summary_variables": random.randn(ROWS, 6, 2).astype("float32"),
    }

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {key: value[index * 9 :][:9] for key, value in data.items()}

    def train(record: Any) -> Any:
        approximator.compile(optimizer=keras.optimizers.Adam(1e-3))
        approximator.fit(dataset=Batches(), epochs=3, verbose=0, callbacks=[record], shuffle=False)
        return approximator

    return Ready(model=approximator, x=None, train=train)
