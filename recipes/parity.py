"""Trains one model on every backend and device count, and says where two trainings diverge, if they do.

    python recipes/parity.py                # lenet on digits, all installed backends on 1, 2 and 4 devices
    python recipes/parity.py --model=convnet --optimizer=adam --precision=float64
    python recipes/parity.py --model=my_model.py:build --backends=torch,jax --device_counts=1,2 --max_steps=20

Expected: a row for each combination, exit code 0; largest difference of a step's loss below 1e-4 after 40 steps, or a
line that says that two differ by round-off alone; the curves on top of one another in parity.png. Some minutes on two
CPU cores.

In float32 backends differ by round-off, which grows with every step; `--precision=float64` leaves only mistakes.
"""

import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_list("backends", None, "Backends to compare. Default: all that are installed.")
flags.DEFINE_list("device_counts", ["1", "2", "4"], "Numbers of devices to compare.")
flags.DEFINE_string("model", "lenet", "A model of kerasdp, such as convnet, or file.py:function.")
flags.DEFINE_string("dataset", "digits", "A data set of kerasdp, such as mnist, or file.py:function.")
flags.DEFINE_string("data_dir", None, "Folder of the data set images.")
flags.DEFINE_string("optimizer", "sgd(learning_rate=0.03, momentum=0.9)", "Any Keras optimizer, such as adam.")
flags.DEFINE_float("learning_rate", None, "Learning rate. Default: as in --optimizer.")
flags.register_validator("device_counts", lambda counts: all(map(str.isdecimal, counts)), "expected such as 1,2,4")
# In TF32, the default precision of GPUs, all trainings would differ.
kerasdp.flags.define("device", "precision", "batch_size", "batch_norm", "compile", "seed", "max_steps", "workdir",
                     device="auto", precision="float32", batch_size=64, max_steps=40)  # fmt: skip


def make_data():
    """Runs in each process. Yours may return `(x, y)`."""
    return kerasdp.load_data(FLAGS.dataset, FLAGS.data_dir)


def make_model():
    """Runs in each process, after the backend is chosen. Yours may return any compiled Keras model."""
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
    """Starts a process for each training. The exit code is 1 where two differ."""
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
