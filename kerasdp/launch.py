"""Starts the workers of a run, and maps the names of backends and strategies to the classes that implement them."""

import atexit
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.checkpoint.storage import is_url, locked_folder, require_folder
from kerasdp.config import BACKENDS, HANG_TIMEOUT, Config
from kerasdp.config.config import CHECKPOINTS
from kerasdp.errors import (
    RunError,
    UserError,
    addressed,
    end_in_a_line,
    is_from_command_line,
    redacted,
    way_to_resume,
)
from kerasdp.processes import hardware, outcome, signals, watchdog
from kerasdp.processes.devices import AlreadyStartedError, Devices, choose_backend, set_backend
from kerasdp.processes.error_text import explained
from kerasdp.processes.ranks import Cluster, ending_alike, find_ranks
from kerasdp.processes.sending import SentFunction, SentResult, name_of, tf_data_of
from kerasdp.processes.workers import supervise

# The module and the class of each engine, by backend and `--strategy`; `--shard` has an engine of its own.
_ENGINES = {(name, "data"): (f"kerasdp.backends.{name}.data_parallel", "DataParallel") for name in BACKENDS} | {
    ("torch", "shard"): ("kerasdp.scale.torch_shards", "ShardedDataParallel"),
    ("jax", "shard"): ("kerasdp.scale.jax_shards", "ShardedDataParallel"),
    ("torch", "pipeline"): ("kerasdp.scale.torch_pipeline", "PipelineParallel"),
    ("jax", "tensor"): ("kerasdp.scale.jax_tensor", "TensorParallel"),
}


def launch(
    train: Callable[..., Any],
    settings: Config | None = None,
    *,
    backend: str | None = None,
    num_devices: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    compile: str | None = None,
    check: str | None = None,
    shard: str | None = None,
    remat: str | None = None,
    strategy: str | None = None,
    cut_at: str | None = None,
    split_size: int | None = None,
    batch_size: int | None = None,
    accumulate: int | None = None,
    max_steps: int | None = None,
    batch_norm: str | None = None,
    seed: int | None = None,
    deterministic: bool | None = None,
    workdir: str | os.PathLike[str] | None = None,
    log_every: int | None = None,
    verbose: int | None = None,
    tracker: str | None = None,
    checkpoint_every: str | int | None = None,
    checkpoint_dir: str | None = None,
    checkpoint_weights: str | None = None,
    keep: int | None = None,
    resume: bool | None = None,
    max_restarts: int | None = None,
    hang_timeout: float | None = None,
) -> Any:
    """Runs `train(runner)` on one or more devices.

    With torch on several devices, `train` runs in one new process per device. Otherwise `train` runs in one new
    process if `max_restarts` or `hang_timeout` is set, or if this process has started another backend or fewer virtual
    devices. In all other cases `train` runs in this process. A new process receives `train`, and the
    objects that `train` refers to. It does not run the script or notebook again.

    If an argument is None, its value comes from `settings`, or is the default. `help(kerasdp.Config)` documents each
    argument in more detail.

    Args:
        train: a function that takes a `kerasdp.Runner`, and builds and trains a Keras model. It may be any function,
            including a nested function, a lambda, or a function of a notebook.
        settings: a `kerasdp.Config` to start from. None: all defaults.
        backend: `"torch"`, `"jax"` or `"tensorflow"`. Default: the backend of Keras.
        num_devices: number of GPUs, TPUs or virtual CPU devices. Default: all GPUs or TPUs, or one CPU device.
        device: `"gpu"`, `"tpu"`, `"cpu"`, or `"auto"`: GPUs or TPUs if there are any.
        precision: `"auto"`, `"float32"`, `"tf32"`, `"bfloat16"`, `"float16"` or `"float64"`.
        compile: torch only: `"on"`, `"off"`, `"cudagraphs"`, or `"auto"`: compile if many steps remain.
        check: `"first"`: before the first update, check that a split batch gives the results of the whole batch.
            `"off"`: no check.
        shard: variables to shard over the devices: `"none"`, `"optimizer"` or `"weights"`.
        remat: layers to compute again in the backward pass: `"none"`, `"blocks"`, or names.
        strategy: how to split the work over the devices: `"data"`, `"pipeline"` (torch) or `"tensor"` (jax).
        cut_at: names of layers after which a pipeline is split, comma-separated.
        split_size: samples per micro-batch of a pipeline.
        batch_size: samples per step over all devices, unless `fit` sets it. Default: 64.
        accumulate: number of micro-batches per step. The step adds their gradients.
        max_steps: number of updates after which the run ends.
        batch_norm: `"sync"`: statistics over the global batch; `"replica"`: over the shard of each replica.
        seed: seed of initial weights, sample order and dropout. Default: 0.
        deterministic: True: a repeated run on the same GPUs is bitwise identical; slower.
        workdir: folder for the files of the run. Default: the run writes no files.
        log_every: steps between two lines of `steps.jsonl`.
        verbose: 0: nothing, 1: progress bar, 2: one line per epoch.
        tracker: one or more of `"tensorboard"`, `"wandb"` and `"mlflow"`, comma-separated.
        checkpoint_every: `"epoch"`, `"never"`, steps (`50`) or minutes (`"10m"`).
        checkpoint_dir: folder or URL of the checkpoints. Default: in `workdir`.
        checkpoint_weights: `"all"`, or `"trained"`: without frozen weights.
        keep: number of newest checkpoints to keep.
        resume: start from the newest checkpoint, if there is one.
        max_restarts: how often to restart from the last checkpoint when a worker dies or hangs.
        hang_timeout: seconds without progress after which the run ends. 0: never.

    Returns:
        The value that `train` returned (with torch on several devices: on rank 0).

    Raises:
        UserError: if an argument does not fit this machine, for example because a device is missing. Also if `train`
            refers to an object that cannot be sent to a new process, or if `train` calls `launch`.
        RunError: if a worker failed; the message is the error of the worker.
        PreemptedError: if SIGTERM or SIGUSR1 arrived, and the run saved a checkpoint. A program that does not catch it
            prints the message as one line, and ends with exit code 99.
        KeyboardInterrupt: after Ctrl-C. The run first saves a checkpoint of its last step. A second Ctrl-C skips this
            checkpoint.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        x, y = np.random.rand(64, 8), np.random.randint(0, 10, 64)

        def train(runner):
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model.fit(x, y, batch_size=32, epochs=2)

        history = kerasdp.launch(train, num_devices=2, device="cpu", workdir="runs/mine")
        print(history.history["loss"])
        ```
    """
    given = {name: value for name, value in locals().items() if name not in ("train", "settings")}
    changes = {name: value for name, value in given.items() if value is not None}
    with _explained_end(settings, changes):
        if _training.locked():
            raise UserError(
                "launch: another call of launch is still running in this process; call launch after it has returned"
            )
        settings = dataclasses.replace(settings or Config(), **changes)
        # Before threads begin, which would have memory of their own.
        with hardware.kept_memory(choose_backend(settings.backend)), signals.noticed():
            cluster, settings = _resolve(settings)
            if "keras" in sys.modules and (cluster is None or cluster.process == 0):
                importlib.import_module("kerasdp.training.data_checks").warn_of_other_seed(settings.seed)
            with _folders(cluster, settings):
                if settings.verbose != 0 and sys.stderr.isatty():  # else a user sees nothing for ten seconds or more
                    print(f"starting {settings.backend} ...", file=sys.stderr, flush=True)
                result = _run(cluster, settings, train)
            return result.received() if isinstance(result, SentResult) else result


@contextlib.contextmanager
def _explained_end(settings: Config | None, changes: dict[str, Any]) -> Iterator[None]:
    """Adds advice on resuming to a `KeyboardInterrupt`, and makes Python print uncaught errors of a run as one line."""
    try:
        yield
    except (KeyboardInterrupt, RunError) as end:
        if isinstance(end, KeyboardInterrupt):
            end.add_note(redacted(_how_to_resume(dataclasses.replace(settings or Config(), **changes))))
        end_in_a_line()
        raise
    finally:
        if is_from_command_line():  # Ctrl-C while Python ends is no error of the frameworks' own last functions
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def _how_to_resume(settings: Config) -> str:
    from kerasdp.checkpoint.files import paths_in

    if not settings.keeps_checkpoints:
        return addressed("the run wrote no checkpoints; add --workdir, and leave out --checkpoint_every=never")
    of_fits = (paths_in(str(settings.checkpoints_of_fit(number))) for number in itertools.count(1))
    try:
        paths = list(itertools.takewhile(bool, of_fits))
    except OSError as error:
        return f"the checkpoints cannot be read ({error})"
    way = way_to_resume(settings.workdir, settings.checkpoint_dir)
    return f"the newest checkpoint is {paths[-1][0]}; resume with {way}" if paths else "there is no checkpoint yet"


def _resolve(settings: Config) -> tuple[Cluster | None, Config]:
    """Chooses the backend, finds the other processes of the run, and completes the settings.

    Returns:
        A tuple: the `Cluster` of this process, or None if the run has only this process; the completed settings.

    Raises:
        UserError: if no backend can be chosen, or the processes cannot train together.
    """
    settings = dataclasses.replace(settings, backend=choose_backend(settings.backend))
    cluster = _find_cluster(settings)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and settings.keeps_checkpoints:
        settings = dataclasses.replace(settings, resume=True)
    return cluster, settings if cluster else settings.with_devices_for_stages()


def _find_cluster(settings: Config) -> Cluster | None:
    """Returns the `Cluster` of this process; None if the run has only this process.

    Raises:
        UserError: if the processes of the run cannot train together.
    """
    found = None
    if settings.backend == "jax":
        found = importlib.import_module("kerasdp.backends.jax.processes").find_cluster()
    found = found or find_ranks(str(settings.backend))
    if found is None:
        return None
    if settings.backend == "torch" and settings.max_restarts:
        raise UserError(
            f"--max_restarts: does not work with {found.source}; leave it out, and let the launcher restart the run, "
            "for example with torchrun --max-restarts=3"
        )
    if settings.backend == "jax" and settings.strategy != "data":
        raise UserError(
            f"--strategy={settings.strategy}: works on one machine only. Received: several machines; use "
            "--strategy=data with --shard=weights"
        )
    return found


@contextlib.contextmanager
def _folders(cluster: Cluster | None, settings: Config) -> Iterator[None]:
    """Creates the folders of a run, and prevents other runs from using these folders during the `with` block."""
    workdir = settings.workdir and os.path.abspath(settings.workdir)
    place, resume = settings.checkpoint_dir, settings.resume
    with contextlib.ExitStack() as stack:
        if workdir is not None:
            require_folder(workdir, resume, "workdir", CHECKPOINTS)
        if place is not None:
            require_folder(place, resume)
        if cluster is None or cluster.process == 0:  # where several hosts share the folder
            given = {"checkpoint_dir": place, "workdir": workdir}  # which may be one folder
            local = {os.path.realpath(each): flag for flag, each in given.items() if each and not is_url(each)}
            for folder, flag in local.items():
                stack.enter_context(locked_folder(folder, resume, flag))
        yield


@contextlib.contextmanager
def local_devices(settings: Config) -> Iterator[list[str]]:
    """Sets up the backend and the devices of a run in this process, for a custom parallel program.

    Use it as a context manager. Models that are built in the `with` block start with the same weights as in a run with
    these settings.

    Args:
        settings: a `kerasdp.Config`. The function uses only `backend`, `num_devices` (None: 2), `device`, `precision`
            and `seed`.

    Yields:
        A list with the name of each device for `keras.device`, such as `["gpu:0", "gpu:1"]`. Without a GPU the devices
        are virtual CPU devices. If there are fewer GPUs than `num_devices`, names are repeated. With torch all virtual
        CPU devices have the same name.

    Raises:
        UserError: if the backend or device does not exist, or this process has started another backend.

    Example:
        ```python
        import keras
        import numpy as np
        import kerasdp

        with kerasdp.local_devices(kerasdp.Config(num_devices=2, device="cpu")) as devices:
            print(devices)  # ["cpu:0", "cpu:1"], with torch ["cpu:0", "cpu:0"]
            for device, rows in zip(devices, np.split(np.random.rand(64, 8), 2)):
                with keras.device(device):
                    print(keras.ops.sum(keras.ops.convert_to_tensor(rows)))
        ```
    """
    name = choose_backend(settings.backend)
    count = settings.num_devices or 2
    settings = dataclasses.replace(settings, backend=name, num_devices=count)
    try:
        set_backend(name)
        with _native_stderr_suppressed():
            backend = importlib.import_module(f"kerasdp.backends.{name}.devices")
            try:
                devices = backend.make_devices(settings)
            except UserError:  # of GPUs, there may be fewer than asked for
                devices = backend.make_devices(dataclasses.replace(settings, num_devices=None))
                if not devices.is_accelerator:
                    raise
            module = importlib.import_module(f"kerasdp.backends.{name}.data_parallel")
            # For the framework's settings (TF32 and the like), which an engine makes when it is made.
            module.DataParallel(dataclasses.replace(devices, count=1), settings)
    except AlreadyStartedError as error:
        raise UserError(f"{error}; call local_devices in a new process") from error
    # Only now may Keras be imported.
    from kerasdp.keras_compat.settings import set_precision, set_seed
    from kerasdp.same import initial_weights

    _prepare_tensorflow(settings)
    set_seed(settings.seed)
    set_precision(settings.precision)
    num_there = 1 if name == "torch" and not devices.is_accelerator else devices.count
    with initial_weights.portable(settings.seed):
        yield [f"{devices.kind}:{number % num_there}" for number in range(count)]


def _run(cluster: Cluster | None, settings: Config, train: Callable[..., Any]) -> Any:
    """Runs `train` in this process or in a new, supervised process.

    A new process is needed if `max_restarts` or `hang_timeout` is set, or if this process has started another backend
    or other devices.
    """
    try:
        set_backend(str(settings.backend))  # by way of the environment, so that worker processes have it, too
        is_rank = cluster is not None and settings.backend == "torch"  # the program that started it watches over it
        if is_rank or not (settings.max_restarts or settings.hang_timeout):
            return _start(cluster, settings, train)
    except AlreadyStartedError as reason:
        if settings.verbose != 0:
            print(f"{reason}: this run starts in a new process", flush=True)
    return supervise(functools.partial(_start, cluster), settings, train)


def _start(cluster: Cluster | None, settings: Config, train: Callable[..., Any]) -> Any:
    """Sets up the devices of the run, starts the workers, and returns the result of `train`."""
    with _native_stderr_suppressed(), signals.delayed():
        backend = importlib.import_module(f"kerasdp.backends.{settings.backend}.devices")
    # With several machines, keep stderr: what JAX says while it waits for the others must be visible.
    with _native_stderr_suppressed() if cluster is None else contextlib.nullcontext():
        devices = backend.make_devices(settings, cluster)
    return backend.start_workers(_work, devices, settings, train)


@contextlib.contextmanager
def _native_stderr_suppressed() -> Iterator[None]:
    """Suppresses the output of native code to stderr during the `with` block. Python errors are still raised.

    TensorFlow (2.21) prints four lines about its build, even if TF_CPP_MIN_LOG_LEVEL is set, and a warning if there
    is no GPU. This warning is not needed, because the first line of a run reports the number of GPUs.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class _QuietTensorFlow(importlib.abc.MetaPathFinder):
    """An import hook that prepares TensorFlow for `tf.data` in a run with another backend.

    The hook suppresses the output of TensorFlow, sets the seed with which `tf.data` shuffles, and hides all GPUs.
    TensorFlow (2.21) would otherwise allocate all memory of each GPU.
    """

    def __init__(self, seed: int):
        self._seed = seed

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Returns the import spec of TensorFlow; None for all other modules."""
        if fullname != "tensorflow":
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, exec_module: Callable[[Any], None], module: Any) -> None:
        with _native_stderr_suppressed():
            exec_module(module)
            module.config.set_visible_devices([], "GPU")
        module.random.set_seed(self._seed)


def _prepare_tensorflow(settings: Config) -> None:
    """Installs `_QuietTensorFlow` in this process if the backend of the run is not TensorFlow."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _QuietTensorFlow)]  # of a run before
    if settings.backend != "tensorflow":
        sys.meta_path.insert(0, _QuietTensorFlow(settings.seed))


def _work(devices: Devices, settings: Config, train: Callable[..., Any]) -> Any:
    """Creates the strategy and the `Runner` in a worker, calls `train`, and returns the result."""
    _prepare_tensorflow(settings)
    with signals.noticed(), _device_errors_told():
        with signals.delayed():
            place, kind = _ENGINES[str(settings.backend), settings.strategy if settings.shard == "none" else "shard"]
            engine = getattr(importlib.import_module(place), kind)
        strategy = engine(devices, settings)
        with signals.delayed():  # only now may Keras be imported
            from kerasdp.reporting.report import warn
            from kerasdp.training.runner import Runner

        if isinstance(train, SentFunction):
            train = train.received()
        elif (name := tf_data_of(train)) is not None:
            warn(
                f"{name}, which {name_of(train)} refers to, is a tf.data.Dataset made before kerasdp.launch. If it "
                f"shuffles, the order does not depend on the seed of the run; create the dataset in {name_of(train)}"
            )
        processes, timeout = strategy.processes, settings.hang_timeout
        if processes.num_processes > 1:
            given = processes.all_gather_object((settings.workdir, settings.resume))
            # By default the name has the time and process number of rank 0. All ranks resume if one of them does.
            settings = dataclasses.replace(settings, workdir=given[0][0], resume=any(resume for _, resume in given))
            timeout = HANG_TIMEOUT if timeout is None else timeout
        says_so = settings.verbose != 0 and processes.rank == 0
        watchdog.current = watchdog.Watchdog(timeout or None, compiler=str(settings.backend) if says_so else "")
        runner = Runner(settings, devices, strategy)
        if settings.remat != "none":
            remat = importlib.import_module("kerasdp.scale.remat")
            runner._transforms.append(functools.partial(remat.rematerialize_in, what=settings.remat))
        one_prints = _only_prints_of(processes.rank == 0)
        with ending_alike(processes), _training, runner._training_function(), one_prints:
            result = train(runner)
        if outcome.current is None:
            return result
        return SentResult(result, settings.workdir) if runner.is_chief else None


@contextlib.contextmanager
def _device_errors_told() -> Iterator[None]:
    """Turns known errors of devices and frameworks, such as too little memory, into one-line errors."""
    try:
        yield
    except Exception as error:
        if (told := explained(error)) is None:
            raise
        raise told from error


_training = threading.Lock()  # held while `train` runs in this process


@contextlib.contextmanager
def _only_prints_of(is_chief: bool) -> Iterator[None]:
    """Discards stdout on all ranks except rank 0, so that `print` shows each line once. Does not change stderr."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(sys.stdout if is_chief else nothing):
        yield
