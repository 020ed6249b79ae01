"""Finds the operation that two backends compute differently, and writes a program that computes it in plain Keras.

    python recipes/bisection.py --model=lenet                      # the first two backends that are installed
    python recipes/bisection.py --model=my_model.py:build --backends=jax,tensorflow --max_steps=3

Expected: exit code 0 and "nothing differs"; or 1, with the operation, its call, shapes and values. In the workdir are
then program.py, if the operation can be called alone, and inputs.npz, which it reads. Half a minute on two CPU cores.

Each step runs without compilation on one device, in float64 by default, in which only mistakes are left.
"""

import functools

import kerasdp


def build_model(config: kerasdp.Config) -> object:
    """Runs in every process, after the backend is chosen. Yours may build any compiled Keras model."""
    import keras

    data = kerasdp.load_data(config)
    model = kerasdp.build_model(config, data.input_shape, data.num_classes)
    model.compile(kerasdp.make_optimizer(config), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def load_data(config: kerasdp.Config) -> object:
    """Runs in every process, after `build_model`. Yours may return `(x, y)`."""
    return kerasdp.load_data(config).train


def find(config: kerasdp.Config, ways: tuple[kerasdp.parity.Way, kerasdp.parity.Way]) -> bool:
    """Runs here, and starts a process for each way to train."""
    finding = kerasdp.parity.bisect(
        functools.partial(build_model, config),
        functools.partial(load_data, config),
        ways,
        steps=config.max_steps,
        batch_size=config.batch_size,
        seed=config.seed,
        device=config.device,
    )
    if finding is None:
        print(f"nothing differs between {ways[0]} and {ways[1]}")
        return True
    print(finding)
    for path in finding.write(config.workdir):
        print(path)
    return False


if __name__ == "__main__":
    kerasdp.main(find, flags="bisection")
