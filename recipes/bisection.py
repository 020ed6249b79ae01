"""Finds the operation that two backends compute differently, in the forward pass, its gradient, or an update.

    python recipes/bisection.py --model=lenet                      # the first two backends that are installed
    python recipes/bisection.py --model=my_model.py:build --backends=jax,tensorflow --max_steps=3

Expected: exit code 0 and "nothing differs"; or 1, with the operation, its call, shapes and values; inputs.npz in the
workdir then holds what the operation got. Half a minute on two CPU cores.

Each step runs without compilation on one device, in float64, in which only mistakes are left.
"""

import functools
import os

import kerasdp


def build_model(config: kerasdp.Config) -> object:
    """Runs in every process, after the backend is chosen. Yours may build any compiled Keras model."""
    import keras

    data = kerasdp.load_data(config.dataset, config.data_dir)
    model = kerasdp.build_model(config.model, data.input_shape, data.num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kerasdp.make_optimizer(config.optimizer, config.learning_rate), loss)
    return model


def load_data(config: kerasdp.Config) -> object:
    """Runs in every process, after `build_model`. Yours may return `(x, y)`."""
    return kerasdp.load_data(config.dataset, config.data_dir).train


def find(config: kerasdp.Config, backends: list[str] | None) -> bool:
    """Runs here, and starts a process for each backend."""
    import numpy as np

    finding = kerasdp.parity.bisect(
        functools.partial(build_model, config),
        functools.partial(load_data, config),
        backends,
        steps=config.max_steps,
        batch_size=config.batch_size,
        seed=config.seed,
        device=config.device,
    )
    print(finding or "nothing differs")
    if finding is not None and finding.call is not None:
        os.makedirs(config.workdir, exist_ok=True)
        np.savez(os.path.join(config.workdir, "inputs.npz"), *finding.call.inputs)
    return finding is None


if __name__ == "__main__":
    kerasdp.main(find, flags="bisection")
