"""Starts the workers of a run. The one place that maps the names of a backend and a strategy to their code."""

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
    """Runs `train(runner)` on one or many devices.

    With torch on several devices, `train` runs in one process per device. It runs in a new process if `max_restarts` or
    `hang_timeout` is given, or if this process has started another backend or fewer virtual devices. `train` is sent to
    such a process with the objects that it refers to; the script or notebook does not run there again. In all other
    cases `train` runs in this process.

    An argument that is None keeps the value of `settings`, or the default. `help(kerasdp.Config)` says more about each.

    Args:
        train: a function of a `kerasdp.Runner`, which builds and trains a Keras model. It may be any function, also a
            nested one, a lambda, or a function of a notebook.
        settings: a `kerasdp.Config` to start from. None: all defaults.
        backend: `"torch"`, `"jax"` or `"tensorflow"`. Default: the backend of Keras.
        num_devices: GPUs, TPUs or virtual CPU devices. Default: all GPUs or TPUs, or one CPU device.
        device: `"gpu"`, `"tpu"`, `"cpu"`, or `"auto"`: GPUs or TPUs if there are any.
        precision: `"auto"`, `"float32"`, `"tf32"`, `"bfloat16"`, `"float16"` or `"float64"`.
        compile: torch: `"on"`, `"off"`, or `"auto"`: compile a step where many are to come.
        check: `"first"`: compare a split batch with a whole one before the first update; `"off"`.
        shard: what each device holds a part of: `"none"`, `"optimizer"` or `"weights"`.
        remat: layers that are computed again in the backward pass: `"none"`, `"blocks"`, or names.
        strategy: what the devices share: `"data"`, `"pipeline"` (torch) or `"tensor"` (jax).
        cut_at: names of layers after which a pipeline is cut, comma-separated.
        split_size: samples per micro-batch of a pipeline.
        batch_size: samples per step over all devices, where `fit` does not say. Default: 64.
        accumulate: micro-batches per step, whose gradients are added up.
        max_steps: updates after which the run ends.
        batch_norm: `"sync"`: statistics over the global batch; `"replica"`: over the rows of each device.
        seed: seed of initial weights, sample order and dropout. Default: 0.
        deterministic: True: a repeated run on the same GPUs gives the same bits; slower.
        workdir: folder for the files of the run. Default: none are written.
        log_every: steps between two lines of `steps.jsonl`.
        verbose: 0: nothing, 1: progress bar, 2: a line per epoch.
        tracker: `"tensorboard"`, `"wandb"`, `"mlflow"`, or some of them, comma-separated.
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
        UserError: if this machine does not have what an argument asks for; if `train` must be sent to other processes
            and refers to an object that cannot be sent; if it is called within the `train` of another launch.
        RunError: if a worker failed; the text is the error of the worker.
        PreemptedError: if SIGTERM or SIGUSR1 came, and the run could save a checkpoint. A program that does not catch
            it ends with the message in one line, and with exit code 99.
        KeyboardInterrupt: after Ctrl-C. The run saves a checkpoint of its last step first; a second Ctrl-C does not
            wait for it.

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
                "launch: the function of another launch runs in this process; call it when that has returned"
            )
        settings = dataclasses.replace(settings or Config(), **changes)
        # Before threads begin, which would have memory of their own.
        with hardware.kept_memory(choose_backend(settings.backend)), signals.noticed():
            cluster, settings = _resolve(settings)
            with _folders(cluster, settings):
                if settings.verbose != 0 and sys.stderr.isatty():  # else nothing is to be seen for ten seconds or more
                    print(f"starting {settings.backend} ...", file=sys.stderr, flush=True)
                result = _run(cluster, settings, train)
            return result.received() if isinstance(result, SentResult) else result


@contextlib.contextmanager
def _explained_end(settings: Config | None, changes: dict[str, Any]) -> Iterator[None]:
    """Lets Ctrl-C say how to resume, and an error that nobody catches be a line, as in a recipe."""
    try:
        yield
    except KeyboardInterrupt as end:
        end.add_note(redacted(_how_to_resume(dataclasses.replace(settings or Config(), **changes))))
        end_in_a_line()
        raise
    except RunError:
        end_in_a_line()
        raise
    finally:
        if is_from_command_line():  # Ctrl-C while Python ends is no error of the frameworks' own last functions
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def _how_to_resume(settings: Config) -> str:
    from kerasdp.checkpoint.files import paths_in

    if not settings.keeps_checkpoints:
        return addressed("it kept no checkpoints: add --workdir, and no --checkpoint_every=never")
    of_fits = (paths_in(str(settings.checkpoints_of_fit(number))) for number in itertools.count(1))
    try:
        paths = list(itertools.takewhile(bool, of_fits))
    except OSError as error:
        return f"its checkpoints cannot be looked at ({error})"
    way = way_to_resume(settings.workdir, settings.checkpoint_dir)
    return f"the newest checkpoint is {paths[-1][0]}; resume with {way}" if paths else "there is no checkpoint yet"


def _resolve(settings: Config) -> tuple[Cluster | None, Config]:
    """Returns the place of this process among several, and the settings with nothing left to choose.

    Raises `UserError` as `launch`.
    """
    settings = dataclasses.replace(settings, backend=choose_backend(settings.backend))
    cluster = _find_cluster(settings)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and settings.keeps_checkpoints:
        settings = dataclasses.replace(settings, resume=True)
    return cluster, settings if cluster else settings.with_devices_for_stages()


def _find_cluster(settings: Config) -> Cluster | None:
    """Returns which of several processes this is; None: the only one. Raises `UserError` if they cannot train so."""
    found = None
    if settings.backend == "jax":
        found = importlib.import_module("kerasdp.backends.jax.processes").find_cluster()
    found = found or find_ranks(str(settings.backend))
    if found is None:
        return None
    if settings.backend == "torch" and settings.max_restarts:
        raise UserError(
            f"--max_restarts: not with the ranks of {found.source}, which may start them again, as torchrun "
            "--max-restarts=3; leave it out"
        )
    if settings.backend == "jax" and settings.strategy != "data":
        raise UserError(
            f"--strategy={settings.strategy}: on one machine only. Received: several; use --strategy=data, with "
            "--shard=weights"
        )
    return found


@contextlib.contextmanager
def _folders(cluster: Cluster | None, settings: Config) -> Iterator[None]:
    """Makes the folders of a run, and keeps other runs out of them."""
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
    """Makes the devices of a run in this process, to write parallelism by hand. It is a context manager.

    Models that are built in the `with` block start with the weights that a run with these settings gives them.

    Args:
        settings: a `kerasdp.Config`; `backend`, `num_devices` (None: 2), `device`, `precision` and `seed` are read.

    Yields:
        A list with a name for each device, for `keras.device`: `["gpu:0", "gpu:1"]`. Without a GPU they are virtual CPU
        devices. If there are fewer GPUs than `num_devices`, names occur more than once. With torch the CPU is one
        device.

    Raises:
        UserError: if there is no such backend or device, or this process has started another backend.

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
        raise UserError(f"{error}: begin in a new process") from error
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
    """Runs in this process, or in one that is watched, or where this one cannot have the devices."""
    try:
        set_backend(str(settings.backend))  # by way of the environment, so that worker processes have it, too
        is_rank = cluster is not None and settings.backend == "torch"  # the program that started it watches over it
        if is_rank or not (settings.max_restarts or settings.hang_timeout):
            return _start(cluster, settings, train)
    except AlreadyStartedError as reason:
        if settings.verbose != 0:
            print(f"{reason}: this run gets a process of its own", flush=True)
    return supervise(functools.partial(_start, cluster), settings, train)


def _start(cluster: Cluster | None, settings: Config, train: Callable[..., Any]) -> Any:
    """Starts the workers."""
    with _native_stderr_suppressed(), signals.delayed():
        backend = importlib.import_module(f"kerasdp.backends.{settings.backend}.devices")
    # With several machines, keep stderr: what JAX says while it waits for the others must be visible.
    with _native_stderr_suppressed() if cluster is None else contextlib.nullcontext():
        devices = backend.make_devices(settings, cluster)
    return backend.start_workers(_work, devices, settings, train)


@contextlib.contextmanager
def _native_stderr_suppressed() -> Iterator[None]:
    """Silences what a framework's native code writes to stderr at its start; Python's errors are raised as ever.

    TensorFlow (2.21) prints four lines on how it was built, whatever TF_CPP_MIN_LOG_LEVEL says, and a warning where
    there is no GPU. The first line of a run says how many GPUs there are.
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
    """Imports TensorFlow, in a run of another backend, without what it prints, keeps it off the GPUs, and seeds it.

    There it is imported for tf.data, which shuffles with that seed. By default it (2.21) would take all of each GPU's
    memory.
    """

    def __init__(self, seed: int):
        self._seed = seed

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Returns how to import TensorFlow; None for other modules."""
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
    """Lets TensorFlow be imported for tf.data, in a run of another backend, as `_QuietTensorFlow` does."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _QuietTensorFlow)]  # of a run before
    if settings.backend != "tensorflow":
        sys.meta_path.insert(0, _QuietTensorFlow(settings.seed))


def _work(devices: Devices, settings: Config, train: Callable[..., Any]) -> Any:
    """Makes strategy and `Runner` in a worker, and calls `train`."""
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
                f"{name}, which {name_of(train)} refers to, is a tf.data.Dataset made before kerasdp.launch: if it "
                f"shuffles, its order is not that of the run's seed; make it in {name_of(train)}"
            )
        processes, timeout = strategy.processes, settings.hang_timeout
        if processes.num_processes > 1:
            given = processes.all_gather_object((settings.workdir, settings.resume))
            # By default one of rank 0's time and number. A host that its first command starts again resumes, too.
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
    """Says in a line what went wrong on a device, which may be full before the first step."""
    try:
        yield
    except Exception as error:
        if (told := explained(error)) is None:
            raise
        raise told from error


_training = threading.Lock()  # held while `train` runs in this process


@contextlib.contextmanager
def _only_prints_of(is_chief: bool) -> Iterator[None]:
    """Lets what `train` prints come once, on torch as on the others; what ranks write to stderr comes from each."""
    with contextlib.ExitStack() as stack:
        if not is_chief:
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield
