"""Trains a model on one backend and device count in a new process, and records each step."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.launch import launch
from kerasdp.processes.sending import sent
from kerasdp.processes.workers import run_workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train: a backend, a number of devices and a precision.

    Args:
        backend: `"torch"`, `"jax"` or `"tensorflow"`.
        num_devices: number of replicas, one per device.
        precision: precision of the arithmetic: `"float32"`, `"float64"`, `"bfloat16"` or `"float16"`.

    Example:
        ```python
        import kerasdp

        print(kerasdp.parity.Way(backend="jax", num_devices=2))  # jax x 2
        print(kerasdp.parity.Way(backend="torch", num_devices=1, precision="float64"))  # torch x 1 float64
        ```
    """

    backend: str
    num_devices: int
    precision: str = "float32"

    def __str__(self) -> str:
        precision = "" if self.precision == "float32" else f" {self.precision}"
        return f"{self.backend} x {self.num_devices}{precision}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The model, the data and the options that training runs on several backends have in common.

    Args:
        build_model: a function without arguments that returns a compiled Keras model. Each worker calls it.
        data: `(x, y)` or `(x, y, sample_weight)` as for `model.fit`, or a function that returns this tuple.
        steps: number of updates. The run repeats the data as often as needed.
        batch_size: number of samples of a global batch.
        seed: seed of initial weights, sample order and random layers.
        batch_norm: `"sync"`: statistics over the global batch. `"replica"`: over the shard of each replica.
        class_weight: weight of each class, as for `model.fit`.
        device: `"cpu"`, `"gpu"`, `"tpu"` or `"auto"`.
        compile: value of `compile` in `kerasdp.Config`. Only torch uses it.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        random = np.random.default_rng(0)
        data = random.random((64, 8)), random.random((64, 1))

        def build_model():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model

        job = kerasdp.parity.Job(build_model=build_model, data=data, steps=10)
        reference = kerasdp.parity.Reference(job, kerasdp.parity.Way(backend="jax", num_devices=1))
        print(reference.trace.losses.shape)  # (10,)
        ```
    """

    build_model: Callable[[], Any]
    data: Any
    steps: int = 40
    batch_size: int = 32
    seed: int = 0
    batch_norm: str = "sync"
    class_weight: dict[int, float] | None = None
    device: str = "cpu"
    compile: str = "auto"


@dataclasses.dataclass(kw_only=True)
class Trace:
    """The recorded values of one training run.

    Args:
        initial: initial values of the model's variables by path, including the seeds of random layers.
        final: values of the variables after the last step, by path.
        losses: loss of each step, over the global batch.
        gradient_norms: norm of the gradient of each step, over all trainable weights.
        samples: for each step, the indices of its samples in the data set.
        metrics: loss and metrics over all training steps. Names with the prefix `evaluate_` are results of an
            evaluation after the last step. It uses at most as many batches as the training.
        optimizer: class name of the optimizer.
        outputs: output of each layer, if the trace is detailed.
        gradients: gradient of each trainable weight by path, if the trace is detailed.
        seconds: seconds from the start of the process to its end.
    """

    initial: dict[str, np.ndarray]
    final: dict[str, np.ndarray]
    losses: np.ndarray
    gradient_norms: np.ndarray
    samples: list[np.ndarray]
    metrics: dict[str, float]
    optimizer: str
    outputs: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    seconds: float = 0.0


def trace(job: Job, way: Way, *, is_detailed: bool = False) -> Trace:
    """Trains a model in a new process, and returns the recorded values.

    Args:
        job: model, data and options of the run.
        way: backend, number of devices and precision of the run.
        is_detailed: True: only one step is trained, and all outputs and gradients are recorded.

    Raises:
        UserError: if the model cannot be sent to a process, or cannot be trained on this backend and these devices.
        RunError: if the run failed.
    """
    start = time.perf_counter()
    job = dataclasses.replace(job, steps=1) if is_detailed else job
    result: Trace = call_in(job, way, _train, is_detailed)
    result.seconds = time.perf_counter() - start
    return result


def call_in(job: Job, way: Way, function: Callable[..., Any], *args: Any) -> Any:
    """Starts a run in a new process, calls `function(runner, job, *args)` in the run, and returns the result.

    Args:
        job: model, data and options of the run.
        way: backend, number of devices and precision of the run.
        function: a module-level function.
        *args: further arguments of the function.

    Raises:
        UserError: if the model cannot be sent to a process, or cannot be trained on this backend and these devices.
        RunError: if the run failed.
    """
    return _in_new_process(f"{way}:", _launch, job, {"KERAS_BACKEND": way.backend}, way, function, *args)


def _in_new_process(title: str, function: Callable[..., Any], job: Job, variables: dict[str, str], *args: Any) -> Any:
    """Calls `function(job, *args)` in a new process with additional environment variables.

    KERAS_BACKEND must be set before the process imports the user's module, because that module may import Keras.
    """
    with contextlib.ExitStack() as stack:
        build_model = stack.enter_context(sent(job.build_model))
        data = stack.enter_context(sent(job.data)) if callable(job.data) else job.data
        job = dataclasses.replace(job, build_model=build_model, data=data)
        return run_workers(function, (job, *args), names=[title], variables=lambda number: variables)


def plain_losses(job: Job, backend: str) -> np.ndarray:
    """Trains a model with `keras.Model.fit`, without kerasdp, on one device in a new process. Returns the losses.

    Raises:
        RunError: if Keras cannot train the model on this backend.
    """
    on_cpu = {"KERAS_TORCH_DEVICE": "cpu", "JAX_PLATFORMS": "cpu"} if job.device == "cpu" else {}
    found: np.ndarray = _in_new_process("Keras:", _fit_plainly, job, {"KERAS_BACKEND": backend} | on_cpu)
    return found


def _fit_plainly(job: Job) -> np.ndarray:
    import keras

    keras.utils.set_random_seed(job.seed)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(job.data() if callable(job.data) else job.data)
    if hasattr(x, "targets"):  # a `Source`, which Keras does not know
        rows = np.arange(min(x.num_samples, job.steps * job.batch_size))
        x, (y, sample_weight) = x.inputs(rows), x.targets(rows)
    model, losses, num_rows = job.build_model(), list[float](), len(keras.tree.flatten(x)[0])
    total = before = 0.0

    def note(batch: int, logs: dict[str, float]) -> None:  # Keras' logs hold the mean over the epoch's samples so far
        nonlocal total, before
        total, before = logs["loss"] * min((batch + 1) * job.batch_size, num_rows), total if batch else 0.0
        losses.append((total - before) / min(job.batch_size, num_rows - batch * job.batch_size))
        model.stop_training = len(losses) == job.steps

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    options = {"class_weight": job.class_weight, "callbacks": [callback], "verbose": 0}
    model.fit(x, y, job.batch_size, epochs=job.steps, sample_weight=sample_weight, **options)
    return np.array(losses)


def _launch(job: Job, way: Way, function: Callable[..., Any], *args: Any) -> Any:
    choices = {name: getattr(job, name) for name in ("device", "batch_size", "seed", "batch_norm")}
    choices["compile"] = job.compile if way.backend == "torch" else "auto"
    settings = Config(backend=way.backend, num_devices=way.num_devices, precision=way.precision, **choices, verbose=0)
    return launch(lambda runner: function(runner, job, *args), settings)


def _train(runner: Any, job: Job, is_detailed: bool) -> Trace:
    """Trains the model of a job in a worker of a run, and returns the recorded values."""
    import keras

    from kerasdp.run_state import Detail
    from kerasdp.step.observer import Observer

    model, (x, y, sample_weight) = made(runner, job)
    initial: dict[str, np.ndarray] = {}
    begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: initial.update(values_of(model.variables)))
    observer = Observer(Detail.EVERYTHING if is_detailed else Detail.SUMMARY)
    runner.state.observer = observer
    history = runner.fit(
        model,
        x,
        y,
        sample_weight=sample_weight,
        class_weight=job.class_weight,
        epochs=1,
        steps_per_epoch=job.steps,
        callbacks=[begin],
    )
    final = values_of(model.variables)
    evaluated = runner.evaluate(model, x, y, sample_weight=sample_weight, steps=job.steps, return_dict=True)
    metrics = {name: values[-1] for name, values in history.history.items()}
    metrics |= {f"evaluate_{name}": value for name, value in evaluated.items()}
    return Trace(
        initial=initial,
        final=final,
        losses=_floats(observer.losses),
        gradient_norms=_floats(observer.gradient_norms),
        samples=[np.asarray(keras.ops.convert_to_numpy(samples)) for samples in observer.samples],
        metrics={name: value for name, value in metrics.items() if np.ndim(value) == 0},
        optimizer=type(model.optimizer).__name__,
        outputs=observer.outputs,
        gradients={
            variable.path: gradient
            for variable, gradient in zip(model.trainable_weights, observer.gradients)
            if gradient is not None
        },
    )


def made(runner: Any, job: Job) -> tuple[Any, tuple[Any, Any, Any]]:
    """Builds the model of a job. Returns the model, and a tuple of inputs, targets and sample weights."""
    import keras

    data = job.data() if callable(job.data) else job.data
    with runner.scope():
        model = job.build_model()
    if not isinstance(model, keras.Model) or not model.compiled:
        raise UserError(f"parity: expected build_model to return a compiled Keras model. Received: {model!r}")
    return model, keras.utils.unpack_x_y_sample_weight(data)


def values_of(variables: list[Any]) -> dict[str, np.ndarray]:
    """Returns the values of variables, by path of the variable, in the given order."""
    import keras

    values: dict[str, np.ndarray] = {}
    for variable in variables:
        # The same layer name may occur twice, in two nested models.
        number = sum(path.partition(" ")[0] == variable.path for path in values)
        name = f"{variable.path} ({number + 1})" if number else variable.path
        values[name] = np.array(keras.ops.convert_to_numpy(variable))
    return values


def _floats(tensors: list[Any]) -> np.ndarray:
    import keras

    return np.array([np.nan if tensor is None else keras.ops.convert_to_numpy(tensor) for tensor in tensors], float)
