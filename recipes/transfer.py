"""Fine-tunes a model of keras.applications on your images: first a new head, then the whole at a low rate.

    python recipes/transfer.py --data_dir=photos                             # a folder with a sub-folder per class
    python recipes/transfer.py --data_dir=photos --backend=jax --gpus=4 --workdir=runs/photos
    python recipes/transfer.py --data_dir=photos --workdir=runs/photos --resume     # in the fit where it stopped
    python recipes/transfer.py --data_dir=photos --backbone=EfficientNetV2B0 --fine_tuning_rate=0.00003
    python recipes/transfer.py --data_dir=photos --weights=backbone.weights.h5      # or --weights=none

Images may be of any size: they are resized to 160 x 160, or as --dataset="images(size=(96,96))" says. The default,
--weights=imagenet, is downloaded once by Keras, into ~/.keras. --epochs are those of the second fit, --head_epochs of
the first, whose rate is that of --optimizer. Files of the second fit are in the folder fit-2 of the workdir.

As in Keras' guide to transfer learning, batch norm of the backbone stays in inference mode in both fits: its
statistics are those of ImageNet, which a few steps on a small data set would spoil. (The guide's training=False does
not do it in Keras 3.15, where `fit` overrides it within a functional model; layers that are frozen are.)

Copy this file into your project and change what you like.
"""

import functools
import os

import kerasdp


def main(config: kerasdp.Config, backbone: str, weights: str, head_epochs: int, fine_tuning_rate: float) -> None:
    """Runs on this machine; `train` runs in the workers."""
    choices = {"backbone": backbone, "weights": weights, "head_epochs": head_epochs, "rate": fine_tuning_rate}
    kerasdp.launch(functools.partial(train, **choices), config)


def train(runner: "kerasdp.Runner", backbone: str, weights: str, head_epochs: int, rate: float) -> None:
    """Runs in every worker process, after the backend is chosen."""
    import keras
    from keras import layers

    config = runner.config
    data = kerasdp.load_data(config.dataset, config.data_dir)
    with runner.scope():
        body, preprocess = kerasdp.load_backbone(backbone, weights, data.input_shape)
        body.trainable = False
        images = keras.Input(data.input_shape)
        x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(body(preprocess(images))))
        model = keras.Model(images, layers.Dense(data.num_classes, name="head")(x), name=f"{backbone}_transfer")
        compile_with(model, kerasdp.make_optimizer(config.optimizer, config.learning_rate))
    fit = functools.partial(runner.fit, model, data.train, batch_size=config.batch_size, validation_data=data.test)
    fit(epochs=head_epochs)
    body.trainable = True
    for layer in body.layers:
        layer.trainable = not isinstance(layer, layers.BatchNormalization)
    with runner.scope():
        compile_with(model, keras.optimizers.Adam(rate))  # after a change of `trainable`
    fit(epochs=config.epochs)
    kerasdp.export(model, os.path.join(config.workdir, "model.keras"))


def compile_with(model, optimizer) -> None:
    """Compiles again, which forgets what the optimizer before had gathered."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])


if __name__ == "__main__":
    kerasdp.main(main, flags="transfer")
