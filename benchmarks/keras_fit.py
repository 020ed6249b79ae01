"""Runs plain Keras `fit` on one device; see `protocol.py` for how it is asked for repetitions.

    echo | python benchmarks/keras_fit.py --backend=torch --model=resnet18
    echo | python benchmarks/keras_fit.py --backend=jax --model=my_model.py:build --dataset=digits

Of kerasdp only the models and data sets are used, which are plain Keras and NumPy.
"""

import os
import time
from typing import Any

import numpy as np
import protocol


class Fit:
    """A compiled model and its data."""

    def __init__(self, args: Any):
        import keras
        import keras_models

        choose_precision(args)
        self.model, x, y = make_task(args)
        # Full batches, and as many as an epoch of `--steps` needs: `fit` would end it where the data end.
        num_rows = max(args.steps, args.first_steps, protocol.WARM_UP_STEPS) * args.batch_size
        indices = np.resize(np.arange(len(y) // args.batch_size * args.batch_size), num_rows)
        self.x, self.y = protocol.map_inputs(lambda array: array[indices], x), y[indices]
        self.model.compile(
            keras.optimizers.SGD(protocol.LEARNING_RATE, protocol.MOMENTUM), **keras_models.make_loss(args),
            jit_compile={"auto": "auto", "on": True, "off": False}[args.jit_compile],
        )  # fmt: skip
        self.batch_size, self.clock = args.batch_size, {}
        self.callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.clock.update(begin=time.perf_counter()),
            on_epoch_end=lambda epoch, logs: self.clock.update(end=time.perf_counter()),
        )

    @property
    def num_parameters(self) -> int:
        """Returns the number of trainable parameters."""
        import keras

        return sum(int(keras.ops.size(weight)) for weight in self.model.trainable_weights)

    def repeat(self, steps: int) -> dict[str, float]:
        """Trains; an epoch ends when its logs are there."""
        history = self.model.fit(
            self.x, self.y, self.batch_size, steps_per_epoch=steps, verbose=0, callbacks=[self.callback]
        ).history
        return {
            "seconds": self.clock["end"] - self.clock["begin"],
            "loss": float(history["loss"][0]),
            "accuracy": float(history.get("accuracy", [0.0])[0]),
            "peak_memory_bytes": peak_memory(),
        }


def make_task(args: Any) -> tuple[Any, Any, np.ndarray]:
    """Returns the model, samples and their labels."""
    import kerasdp

    if args.model in protocol.WIDTHS:
        import keras_models

        return keras_models.make_model(args), *protocol.make_data(args)
    if args.dataset is None:
        x, y = protocol.make_data(args)
        return kerasdp.build_model(args.model, x.shape[1:], protocol.NUM_CLASSES), x, y
    data = kerasdp.load_data(args.dataset, args.data_dir)
    indices = np.arange(data.train.num_samples)
    x, (y, _) = data.train.inputs(indices), data.train.targets(indices)
    return kerasdp.build_model(args.model, x.shape[1:], data.num_classes), x, y


def choose_precision(args: Any) -> None:
    """Sets the policy; float32 means float32, without the shorter numbers of tensor cores, auto what Keras does."""
    import keras

    if args.precision == "auto":
        return
    if args.precision != "float32":
        keras.config.set_dtype_policy(f"mixed_{args.precision}")
    if args.backend == "torch":
        import torch

        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    elif args.backend == "jax":
        import jax

        jax.config.update("jax_default_matmul_precision", "float32")
    else:
        import tensorflow as tf

        tf.config.experimental.enable_tensor_float_32_execution(False)


def choose_device(args: Any) -> str:
    """Hides GPUs from Keras with `--device=cpu`; the name of the device."""
    if args.device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "KERAS_TORCH_DEVICE": "cpu"}
    if args.backend == "torch":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if args.backend == "jax":
        import jax

        if args.device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        device = jax.devices()[0]
        return "cpu" if device.platform == "cpu" else device.device_kind
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else "cpu"


def peak_memory() -> int:
    """Returns the most memory that the device (on the CPU: this process) has used, in bytes."""
    import keras

    name = keras.backend.backend()
    used = 0
    if name == "torch":
        import torch

        used = torch.cuda.max_memory_allocated()
    elif name == "jax":
        import jax

        used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    else:
        import tensorflow as tf

        if tf.config.list_physical_devices("GPU"):
            used = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return used or protocol.peak_memory()


def main() -> None:
    """Runs one process on one device."""
    flags = protocol.parser(__doc__, models=None)
    flags.add_argument("--backend", required=True, choices=["torch", "jax", "tensorflow"])
    flags.add_argument("--jit_compile", default="auto", choices=["auto", "on", "off"], help="of compile")
    flags.add_argument("--dataset", help="a data set of kerasdp; default, of the loops' models: random images")
    flags.add_argument("--data_dir", help="the folder of its files")
    args = protocol.parse(flags)
    if args.devices > 1:
        flags.error("plain fit: one device")
    if args.dataset is None and args.model not in protocol.SHAPES:
        flags.error(f"--dataset is needed: there are random images for {', '.join(protocol.SHAPES)} only")
    os.environ |= {"KERAS_BACKEND": args.backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
    device = choose_device(args)
    fit = Fit(args)
    protocol.serve(fit.repeat, args.steps, first_steps=args.first_steps, parameters=fit.num_parameters, device=device)


if __name__ == "__main__":
    main()
