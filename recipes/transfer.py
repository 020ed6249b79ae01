"""Fine-tunes a model of keras.applications on your images: first a new head, then the whole at a low rate.

    python recipes/transfer.py --data_dir=photos                             # a folder with a sub-folder per class
    python recipes/transfer.py --data_dir=photos --backend=jax --gpus=4 --workdir=runs/photos
    python recipes/transfer.py --data_dir=photos --workdir=runs/photos --resume     # in the fit where it stopped
    python recipes/transfer.py --data_dir=photos --backbone=EfficientNetV2B0 --fine_tuning_rate=0.00003
    python recipes/transfer.py --data_dir=photos --weights=backbone.weights.h5      # or --weights=none

Images may be of any size: they are resized to 160 x 160, or as --dataset="images(size=(96,96))" says. The default,
--weights=imagenet, is downloaded once by Keras, into ~/.keras. Files of the second fit are in the folder fit-2 of the
workdir.

As in Keras' guide to transfer learning, batch norm of the backbone stays in inference mode in both fits: its
statistics are those of ImageNet, which a few steps on a small data set would spoil. (The guide's training=False does
not do it in Keras 3.15, where `fit` overrides it within a functional model; layers that are frozen are.)

Copy this file into your project and change what you like.
"""

import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("backbone", "MobileNetV2", "Model of keras.applications.")
flags.DEFINE_string("weights", "imagenet", "imagenet (a download), none, or a .weights.h5 file.")
flags.DEFINE_string("dataset", "images(size=(160,160))", "Images and their size, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of the images, with a sub-folder per class.")
flags.DEFINE_integer("batch_size", 32, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("head_epochs", 5, "Epochs of the first fit, which trains the new head alone.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.001, "Learning rate of the first fit.")
flags.DEFINE_integer("epochs", 5, "Epochs of the second fit, which trains all layers.", lower_bound=1)
flags.DEFINE_float("fine_tuning_rate", 1e-5, "Learning rate of the second fit.")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and all else that `launch` takes


def train(runner):
    """Runs once the backend is chosen. With torch on several devices each device has a process, which runs it."""
    import keras
    from keras import layers

    data = kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)
    with runner.scope():
        backbone, preprocess = kerasdp.load_backbone(FLAGS.backbone, FLAGS.weights, data.input_shape)
        backbone.trainable = False
        images = keras.Input(data.input_shape)
        x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(backbone(preprocess(images))))
        logits = layers.Dense(data.num_classes, name="head")(x)
        model = keras.Model(images, logits, name=f"{FLAGS.backbone}_transfer")
        compile_model(model, FLAGS.learning_rate)
    model.fit(data.train, batch_size=FLAGS.batch_size, epochs=FLAGS.head_epochs, validation_data=data.test)
    backbone.trainable = True
    for layer in backbone.layers:
        layer.trainable = not isinstance(layer, layers.BatchNormalization)
    with runner.scope():
        compile_model(model, FLAGS.fine_tuning_rate)  # after a change of `trainable`
    model.fit(data.train, batch_size=FLAGS.batch_size, epochs=FLAGS.epochs, validation_data=data.test)
    kerasdp.export(model, os.path.join(runner.config.workdir, "model.keras"))


def compile_model(model, learning_rate):
    """Compiles a model with a new optimizer."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])


def main(argv):
    """Runs in the process that was started."""
    kerasdp.launch(train, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
