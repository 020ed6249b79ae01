"""Compares the training of a model on all backends and numbers of devices.

    python recipes/parity.py                # lenet on digits, all installed backends on 1, 2 and 4 devices
    python recipes/parity.py --model=convnet --optimizer=adam --precision=float64
    python recipes/parity.py --model=my_model.py:build --backends=torch,jax --device_counts=1,2 --max_steps=20

Expected: exit code 0, and a row for each combination. Over 40 steps the losses differ by less than 1e-4. If they
differ more, but by round-off alone, the output says so. The curves in parity.png lie on top of one another. This takes
some minutes on two CPU cores. If two trainings diverge, the exit code is 1.

In float32 backends differ by round-off, which grows with every step. With --precision=float64 a visible difference is a
bug.
"""

import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_list("backends", None, "Backends to compare. Default: all installed backends.")
flags.DEFINE_list("device_counts", ["1", "2", "4"], "Numbers of devices to compare.")
flags.DEFINE_string("model", "lenet", "A model of kerasdp, such as convnet, or file.py:function.")
flags.DEFINE_string("dataset", "digits", "A data set of kerasdp, such as mnist, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of images, for --dataset=images only.")
flags.DEFINE_string("optimizer", "sgd(learning_rate=0.03, momentum=0.9)", "Any Keras optimizer, such as adam.")
flags.DEFINE_float("learning_rate", None, "Learning rate. Default: as in --optimizer.")
flags.register_validator("device_counts", lambda counts: all(map(str.isdecimal, counts)), "expected, for example 1,2,4")
# Not TF32, the default precision on GPUs: in TF32 all trainings would differ.
kerasdp.flags.define("device", "precision", "batch_size", "batch_norm", "compile", "seed", "max_steps", "workdir",
                     device="auto", precision="float32", batch_size=64, max_steps=40)  # fmt: skip


def make_data():
    """Loads the data set. Runs in the process of each training."""
    return kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)


def make_model():
    """Builds and compiles the model. Runs in each process, after the backend is chosen."""
    import keras

    data = make_data()
    model = kerasdp.build_model(FLAGS.model, data.input_shape, data.num_classes)
    model.compile(
        optimizer=kerasdp.make_optimizer(FLAGS.optimizer, FLAGS.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(argv):
    """Runs one process for each training. Returns exit code 1 if two trainings diverge."""
    given = kerasdp.flags.values(argv)
    workdir, steps = given.pop("workdir"), given.pop("max_steps")
    comparison = kerasdp.parity.compare(
        make_model,
        lambda: make_data().train,
        backends=FLAGS.backends,
        device_counts=[int(count) for count in FLAGS.device_counts],
        steps=steps,
        with_plain=True,
        report=lambda outcome: print(f"{outcome.way}: {outcome.seconds:.1f} s", flush=True),
        **given,
    )
    print(comparison.table())
    os.makedirs(workdir, exist_ok=True)
    picture = os.path.join(workdir, "parity.png")
    comparison.draw(picture, f"{FLAGS.model} on {FLAGS.dataset}, batch {FLAGS.batch_size}")
    print(f"picture in {picture}")
    return 0 if comparison.passed else 1


if __name__ == "__main__":
    app.run(main)
