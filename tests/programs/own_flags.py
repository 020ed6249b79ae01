"""A program with flags of its own beside those of `kerasdp.launch`; says what `train` sees of both."""

import json

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
_RATE = flags.DEFINE_float("learning_rate", 0.1, "Learning rate.")
flags.DEFINE_integer("batch_size", 16, "Samples per step.")
flags.DEFINE_list("sizes", ["3", "4"], "Numbers.")
kerasdp.flags.define(precision="float64")


def train(runner):
    config = runner.config
    seen = [FLAGS.batch_size, flags.FLAGS.sizes, _RATE.value, FLAGS.gpus, FLAGS.resume]
    return {"flags": seen, "config": [config.batch_size, config.precision, config.workdir, runner.num_replicas]}


def main(argv):
    found = kerasdp.launch(train, **kerasdp.flags.values(argv))
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    app.run(main)
