"""Trains an image classifier on any Keras backend, on one or many devices.

    python recipes/train.py                                  # the first backend installed, all GPUs or the CPU
    python recipes/train.py --backend=jax --gpus=4           # four GPUs, or four virtual CPU devices
    python recipes/train.py --model=convnet --dataset=fashion_mnist --optimizer='adamw(global_clipnorm=1.0)' --decay
    python recipes/train.py --workdir=runs/mine --resume     # continues where it stopped, on any backend and devices
    python recipes/train.py --flagfile=flags/resnet18_fashion_2gpus.flags
    python recipes/train.py --help

Expected of the first two commands: validation accuracy of 0.975 on held-out digits, in less than a minute on two CPU
cores. The losses are the same on every backend and number of devices. They are in steps.jsonl in the workdir.

Copy this file into your project and edit it.
"""

import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 64, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("epochs", 20, "Passes over the training data.", lower_bound=1)
flags.DEFINE_float("learning_rate", None, "Initial learning rate. Default: as in --optimizer.")
flags.DEFINE_bool("decay", False, "Decay the learning rate to 0 along a cosine.")
flags.DEFINE_string("optimizer", "sgd(learning_rate=0.03, momentum=0.9)", "Any Keras optimizer, such as adam.")
flags.DEFINE_string("model", "lenet", "mlp, lenet, convnet, resnet18, resnet50, or file.py:function.")
flags.DEFINE_string("dataset", "digits", "digits, mnist, fashion_mnist, cifar10, 'images(size=(64,64))', ...")
flags.DEFINE_string("data_dir", None, "Folder of images with a sub-folder per class, for --dataset=images only.")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and the other arguments of `launch`


def make_data():
    """Loads images with values from 0 to 255, and their classes. `fit` also takes arrays, tf.data and DataLoaders."""
    return kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)


def make_model(input_shape, num_classes):
    """Builds a model that returns logits for images. To use your Keras model, return it here and remove --model."""
    from kerasdp.models import convnet, lenet, mlp, resnet18, resnet50  # plain Keras

    return kerasdp.build_model(FLAGS.model, input_shape, num_classes, [mlp, lenet, convnet, resnet18, resnet50])


def make_optimizer(num_steps):
    """Builds the optimizer. With --decay its learning rate reaches 0 after `num_steps` steps."""
    import keras

    optimizer = kerasdp.make_optimizer(FLAGS.optimizer, FLAGS.learning_rate)
    if FLAGS.decay:
        optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(float(optimizer.learning_rate), num_steps)
    return optimizer


def train(runner):
    """Trains the model, after the backend is chosen. With torch this function runs in one process for each device."""
    import keras

    data = make_data()
    with runner.scope():
        model = make_model(data.input_shape, data.num_classes)
        model.compile(
            optimizer=make_optimizer(num_steps=FLAGS.epochs * -(-data.train.num_samples // FLAGS.batch_size)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        data.train,
        batch_size=FLAGS.batch_size,
        epochs=FLAGS.epochs,
        validation_data=data.test,
        callbacks=[],  # any of keras.callbacks, such as EarlyStopping(patience=3)
    )
    kerasdp.export(model, os.path.join(runner.config.workdir, "model.keras"))  # a standard Keras file


def main(argv):
    """Starts the training with the flags."""
    kerasdp.launch(train, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
