"""Finds the operation that two backends compute differently, and writes a program that computes it in plain Keras.

    python recipes/bisection.py --model=lenet                      # the first two backends that are installed
    python recipes/bisection.py --model=my_model.py:build --backends=jax,tensorflow --max_steps=3
    python recipes/bisection.py --model=my_model.py:build --precision=float32

Expected: exit code 0 and "nothing differs"; or 1, with the operation, its call, shapes and values, and program.py in
the workdir, if the operation can be called alone. Half a minute on two CPU cores.

Each step runs without compilation on one device, in float64 by default, in which only mistakes are left.
"""

import functools
import os

import kerasdp


def build_model(config: kerasdp.Config) -> object:
    """Runs in every process, after the backend is chosen. Yours may build any compiled Keras model."""
    data = kerasdp.load_data(config)
    model = kerasdp.build_model(config, data.input_shape, data.num_classes)
    model.compile(optimizer=kerasdp.make_optimizer(config, data.train), loss=kerasdp.make_loss(config))
    return model


def load_data(config: kerasdp.Config) -> object:
    """Runs in every process, after `build_model`. Yours may return `(x, y)`."""
    return kerasdp.load_data(config).train


def find(config: kerasdp.Config, backends: tuple[str, str]) -> bool:
    """Runs here, and starts a process for each backend."""
    first, second = (kerasdp.parity.Way(backend=name, num_devices=1, precision=config.precision) for name in backends)
    finding = kerasdp.parity.bisect(
        functools.partial(build_model, config),
        functools.partial(load_data, config),
        (first, second),
        steps=config.max_steps,
        batch_size=config.batch_size,
        seed=config.seed,
        device=config.device,
    )
    if finding is None:
        print(f"nothing differs between {first} and {second}")
        return True
    print(finding)
    if finding.program:
        os.makedirs(config.workdir, exist_ok=True)
        path = os.path.join(config.workdir, "program.py")
        with open(path, "w") as file:
            file.write(finding.program)
        print(f"{path} computes it in plain Keras: run it with KERAS_BACKEND={first.backend} and {second.backend}")
    return False


if __name__ == "__main__":
    kerasdp.main(find, flags="bisection")
