"""Fine-tunes a model of keras.applications on your images.

    python recipes/transfer.py --data_dir=photos                             # a folder with a sub-folder per class
    python recipes/transfer.py --data_dir=photos --backend=jax --gpus=4 --workdir=runs/photos
    python recipes/transfer.py --data_dir=photos --workdir=runs/photos --resume     # resumes the fit that was stopped
    python recipes/transfer.py --data_dir=photos --backbone=EfficientNetV2B0 --fine_tuning_rate=0.00003
    python recipes/transfer.py --data_dir=photos --weights=backbone.weights.h5      # or --weights=none

The first fit trains a new head. The second fit also trains the backbone, at a low learning rate. Its files are in the
folder fit-2 of the workdir.

Images may have any size. They are resized to 160 x 160, or to the size in --dataset="images(size=(96,96))". With
--weights=imagenet, the default, Keras downloads the weights once, to ~/.keras.

Batch norm of the backbone stays in inference mode in both fits, as in Keras' guide to transfer learning. A few steps on
a small data set would spoil its ImageNet statistics. The guide calls the backbone with training=False. In Keras 3.15
`fit` overrides this within a functional model, so this recipe freezes the layers.

Copy this file into your project and edit it.
"""

import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_string("backbone", "MobileNetV2", "Name of a model of keras.applications.")
flags.DEFINE_string("weights", "imagenet", "imagenet (a download), none, or a .weights.h5 file.")
flags.DEFINE_string("dataset", "images(size=(160,160))", "Data set: images(size=(HEIGHT,WIDTH)) or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of images, with a sub-folder per class.")
flags.DEFINE_integer("batch_size", 32, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("head_epochs", 5, "Epochs of the first fit, which trains only the new head.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.001, "Learning rate of the first fit.")
flags.DEFINE_integer("epochs", 5, "Epochs of the second fit, which also trains the backbone.", lower_bound=1)
flags.DEFINE_float("fine_tuning_rate", 1e-5, "Learning rate of the second fit.")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and the other arguments of `launch`


def train(runner):
    """Trains the model, after the backend is chosen. With torch this function runs in one process for each device."""
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
        compile_model(model, FLAGS.fine_tuning_rate)  # needed after a change of `trainable`
    model.fit(data.train, batch_size=FLAGS.batch_size, epochs=FLAGS.epochs, validation_data=data.test)
    kerasdp.export(model, os.path.join(runner.config.workdir, "model.keras"))


def compile_model(model, learning_rate):
    """Compiles a model with a new optimizer."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])


def main(argv):
    """Starts the training with the flags."""
    kerasdp.launch(train, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
