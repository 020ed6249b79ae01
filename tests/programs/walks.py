"""Prints the longest walk in which `tf.custom_gradient` looks for variables, in nets of several depths on two devices.

python walks.py WORKDIR
"""

import sys

import numpy as np
from starting import printed
from tensorflow.python.ops import op_selector


def longest_walk(depth, runner):
    """The most operations that were passed in one walk while a net of so many blocks was traced."""
    import keras

    walk, lengths = op_selector.get_backward_walk_ops, []

    def counted(*args, **kwargs):
        passed = walk(*args, **kwargs)
        lengths.append(len(passed))
        return passed

    with runner.scope():
        kinds = [lambda: keras.layers.Conv2D(3, 3), keras.layers.BatchNormalization]
        blocks = [kind() for kind in kinds * depth]
        model = keras.Sequential([keras.Input((16, 16, 3)), *blocks, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    op_selector.get_backward_walk_ops = counted
    runner.fit(model, np.ones((8, 16, 16, 3), "float32"), np.ones((8, 1), "float32"))
    op_selector.get_backward_walk_ops = walk
    return max(lengths)


def longest_walks(runner):
    return {depth: longest_walk(depth, runner) for depth in (2, 6)}


if __name__ == "__main__":
    printed(longest_walks, "tensorflow", 2, batch_size=8, workdir=sys.argv[1])
