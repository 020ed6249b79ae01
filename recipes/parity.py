"""Trains one model on every backend and device count, and says where two trainings diverge, if they do.

    python recipes/parity.py                # lenet on digits, all installed backends on 1, 2 and 4 devices
    python recipes/parity.py --model=convnet --optimizer=adam --precision=float64
    python recipes/parity.py --model=my_model.py:build --backends=torch,jax --device_counts=1,2 --max_steps=20

Expected: a row for each combination, exit code 0; largest difference of a step's loss below 1e-4 after 40 steps, or a
line that says that two differ by round-off alone; the curves on top of one another in parity.png. Some minutes on two
CPU cores.

In float32 backends differ by round-off, which grows with every step; `--precision=float64` leaves only mistakes.
"""

import functools
import os

import kerasdp


def build_model(config: kerasdp.Config) -> object:
    """Runs in every process, after the backend is chosen. Yours may build any compiled Keras model."""
    import keras

    data = kerasdp.load_data(config.dataset, config.data_dir)
    model = kerasdp.build_model(config.model, data.input_shape, data.num_classes)
    model.compile(
        optimizer=kerasdp.make_optimizer(config.optimizer, config.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def load_data(config: kerasdp.Config) -> object:
    """Runs in every process, after `build_model`. Yours may return `(x, y)`."""
    return kerasdp.load_data(config.dataset, config.data_dir).train


def compare(config: kerasdp.Config, backends: list[str] | None, device_counts: list[int]) -> bool:
    """Runs here, and starts a process for each way to train."""
    comparison = kerasdp.parity.compare(
        functools.partial(build_model, config),
        functools.partial(load_data, config),
        backends=backends,
        device_counts=device_counts,
        device=config.device,
        precision=config.precision,
        steps=config.max_steps or 40,
        batch_size=config.batch_size,
        seed=config.seed,
        batch_norm=config.batch_norm,
        compile=config.compile,
        with_plain=True,
        report=lambda outcome: print(f"{outcome.way}: {outcome.seconds:.1f} s", flush=True),
    )
    print(comparison.table())
    os.makedirs(config.workdir, exist_ok=True)
    picture = os.path.join(config.workdir, "parity.png")
    comparison.draw(picture, f"{config.model} on {config.dataset}, batch {config.batch_size}")
    print(f"picture in {picture}")
    return comparison.passed


if __name__ == "__main__":
    kerasdp.main(compare, flags="parity")
