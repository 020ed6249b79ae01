"""Trains a step of a run again, and looks into it: its samples, what layers gave, gradients, and whose loss it was."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy

from kerasdp.config import Config, Request, spec
from kerasdp.config.choices import choices_of
from kerasdp.config.workdir import CHECKPOINTS
from kerasdp.errors import CheckpointError, UserError, redacted
from kerasdp.launch import launch
from kerasdp.reporting import report
from kerasdp.reporting.figure import make_figure
from kerasdp.runtime.run_state import Detail

NUM_PICTURES = 64
# What a replay has none of: ways to compute the same that cannot be looked into, files, and what else a run does.
_NOT_REPLAYED = (
    "strategy", "num_stages", "cut_at", "balance", "split_size", "micro_batches", "pipeline_schedule", "accumulate",
    "workdir", "checkpoint_dir", "export", "tracker", "profile", "resume", "max_restarts", "hang_timeout", "dry_run",
    "fit_into", "verbose", "hosts", "host_rank", "coordinator", "interface", "checkpoint_every", "early_stopping",
)  # fmt: skip
# Fields in which a file may name code: a function in a file of Python.
_CODE = ("model", "dataset", "optimizer", "schedule")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What a sample did to a step.

    Args:
        sample: its place in the data set.
        loss: what it added to the loss: those of all samples and of regularization add up to it.
        gradient: its part of the gradient: those of all samples and of regularization add up to 1; against the others'
            it is below 0; not a number where the loss is none.
    """

    sample: int
    loss: float
    gradient: float


@dataclasses.dataclass(kw_only=True)
class Replayed:
    """A step of a run.

    Args:
        run: where it is, in words.
        step: counted from 1.
        epoch: likewise.
        begun: the step of the checkpoint from which the run was trained again; 0: from its beginning.
        way: backend and devices.
        loss: of the global batch, as in the run.
        learning_rate: of the update; None if the step does not tell it.
        samples: places in the data set, of shape `(rows,)`.
        inputs: of the global batch, by name.
        targets: likewise; empty on several devices.
        before: weights before the step, by path.
        after: weights after it.
        outputs: what each layer gave, by name and in the order of the calls.
        gradients: of the loss by each trainable weight, by path.
        shares: of samples, if they were asked for, those that did most first.
    """

    run: str
    step: int
    epoch: int = 0
    begun: int = 0
    way: str = ""
    loss: float = np.nan
    learning_rate: float | None = None
    samples: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    inputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    targets: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    before: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    after: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    outputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    gradients: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    shares: list[Share] = dataclasses.field(default_factory=list)

    @property
    def gradient_norm(self) -> float:
        """Returns the norm of the gradient by all weights."""
        return float(np.sqrt(sum(np.square(each.astype("float64")).sum() for each in self.gradients.values())))

    def __str__(self) -> str:
        begun = f"the checkpoint of step {self.begun:,}" if self.begun else "the beginning"
        rate = "" if self.learning_rate is None else f" | learning rate {self.learning_rate:.3g}"
        shown = ", ".join(map(str, self.samples[:12])) + (", ..." if len(self.samples) > 12 else "")
        lines = [
            f"step {self.step:,} of {self.run}, epoch {self.epoch}, on {self.way}, trained from {begun}",
            f"loss {self.loss:.8g} | norm of the gradient {self.gradient_norm:.6g}{rate}",
            f"{len(self.samples)} samples, by their places in the data: {shown}",
        ]
        for title, arrays in (
            ("inputs", self.inputs), ("what layers gave", self.outputs), ("gradients", self.gradients)
        ):  # fmt: skip
            lines += ["", f"{title:44} {'shape':>18} {'mean':>11} {'deviation':>11} {'least':>11} {'largest':>11}"]
            lines += [_row(name, array) for name, array in arrays.items()]
        if self.shares:
            lines += ["", f"{'sample':>10} {'of the loss':>14} {'of the gradient':>16}"]
            lines += [f"{one.sample:>10} {one.loss:>14.6g} {one.gradient:>16.4g}" for one in self.shares]
        return "\n".join(lines)

    def save(self, folder: str) -> list[str]:
        """Writes replay.json, all arrays (replay.safetensors), and samples.png if there are images; returns paths."""
        os.makedirs(folder, exist_ok=True)
        paths = [os.path.join(folder, name) for name in ("replay.json", "replay.safetensors")]
        arrays = {
            f"{group}/{name}": np.asarray(array, order="C")
            for group in ("inputs", "targets", "before", "after", "outputs", "gradients")
            for name, array in getattr(self, group).items()
        }
        facts = {name: getattr(self, name) for name in ("run", "step", "epoch", "begun", "way", "loss")}
        facts |= {"learning_rate": self.learning_rate, "gradient_norm": self.gradient_norm}
        facts |= {"samples": self.samples.tolist(), "shares": [dataclasses.asdict(one) for one in self.shares]}
        with open(paths[0], "w") as file:
            # JSON has no NaN: it is a text.
            file.write(re.sub(r"(?<=: )(-?Infinity|NaN)", r'"\1"', json.dumps(facts, indent=2)))
        safetensors.numpy.save_file(arrays, paths[1])
        pictures = next((array for array in self.inputs.values() if _is_images(array)), None)
        if pictures is not None:
            paths.append(os.path.join(folder, "samples.png"))
            self._draw(pictures, paths[-1])
        return paths

    def _draw(self, images: np.ndarray, path: str) -> None:
        """Draws the images of the step; those that did most first, with what they added to the loss."""
        place = {int(sample): row for row, sample in enumerate(self.samples)}
        losses = {one.sample: one.loss for one in self.shares}
        first = [place[sample] for sample in losses]
        rows = [*first, *(row for row in range(len(images)) if row not in first)][:NUM_PICTURES]
        columns = min(8, len(rows))
        lines = -(-len(rows) // columns)
        figure, axes = make_figure(1.2 * columns, 1.4 * lines, rows=lines, columns=columns)
        for axis in axes:
            axis.axis("off")
        for axis, row in zip(axes, rows):
            image = images[row].astype("float64")
            low, high = (np.nanmin(image), np.nanmax(image)) if np.isfinite(image).any() else (0.0, 1.0)
            axis.imshow(np.squeeze((image - low) / max(high - low, 1e-12)), cmap="gray")
            sample = int(self.samples[row])
            loss = f"\n{losses[sample]:.3g}" if sample in losses else ""
            axis.set_title(f"{sample}{loss}", fontsize=7)
        figure.savefig(path, dpi=110)


def _is_images(array: np.ndarray) -> bool:
    return array.ndim == 4 and array.shape[-1] in (1, 3) and min(array.shape[1:3]) > 3


def _row(name: str, array: np.ndarray) -> str:
    numbers = np.asarray(array, "float64")
    odd = numbers.size - np.isfinite(numbers).sum()
    with np.errstate(all="ignore"):
        figures = (numbers.mean(), numbers.std(), numbers.min(), numbers.max()) if numbers.size else (np.nan,) * 4
    shape = "x".join(map(str, array.shape)) or "a number"
    words = f"{name[-44:]:44} {shape:>18} " + " ".join(f"{value:>11.4g}" for value in figures)
    return f"{words}  {odd:,} not finite" if odd else words


def replay(
    train: Callable[[Any], Any],
    request: Request,
    step: int,
    *,
    num_blamed: int = 0,
    backend: str | None = None,
    num_devices: int | None = None,
    device: str | None = None,
) -> Replayed:
    """Trains a step of a run again, from the newest checkpoint before it, or from the run's beginning.

    On the backend and the number of devices of the run, on the CPU, weights and loss are those of the run bit by bit;
    elsewhere up to round-off. Nothing of the run is changed.

    Args:
        train: the function that trained it, as for `kerasdp.launch`. It is left after the step, which is one of its
            first `fit`.
        request: `checkpoint` is the run's workdir, or its folder of checkpoints. `model`, `dataset`, `data_dir` and
            `trust_checkpoint` as in `kerasdp.inference.load_trained`.
        step: counted from 1.
        num_blamed: of how many samples of the step `Replayed.shares` is computed: those that added most to the loss. On
            one device.
        backend: None: that of the run. Likewise `num_devices` and `device`.
        num_devices: of this replay.
        device: of this replay.

    Raises:
        UserError: if the run cannot be trained again here, or has no such step.
        RunError: if it fails before the step.
    """
    from kerasdp.checkpoint import files

    begun, path, saved = _begun(request.checkpoint, step)
    choices = _choices(saved, request, path)
    choices |= {"backend": backend or saved["saved_by"]["backend"]}
    choices["num_devices"] = num_devices or saved["saved_by"]["devices"]
    choices |= {} if device is None else {"device": device}
    with tempfile.TemporaryDirectory(prefix="kerasdp-replay-") as temporary:
        if begun:
            os.mkdir(place := os.path.join(temporary, CHECKPOINTS))
            files.save(files.path_of(place, begun), files.load(path))
            choices |= {"workdir": temporary, "resume": True}
        else:
            choices["checkpoint_every"] = "never"
        config = Config(**choices, verbose=0)
        identity = _identity(saved, request.checkpoint)
        found = launch(functools.partial(_replayed, train, step, num_blamed, identity), config)
    if found is None:
        raise UserError(f"--step: {request.checkpoint} has no step {step}: it ended before")
    return Replayed(run=request.checkpoint, step=step, begun=begun, **found)


def _identity(saved: dict[str, Any], run: str) -> dict[str, Any] | None:
    """Returns what the run's checkpoints say of what it trained; None, with a warning, if there is none.

    Raises:
        UserError: if a replay, which trains whole batches, cannot be the same.
    """
    from kerasdp.checkpoint.state import MICRO_BATCH_ROWS

    identity = saved.get("identity")
    if not isinstance(identity, dict):
        report.warn(f"no checkpoint of {run} says what it trained: nothing tells if this is the same")
        return None
    if rows := identity.get(MICRO_BATCH_ROWS):
        raise UserError(
            f"replay: the batch norms of {run} saw {rows} rows at a time (a pipeline, or --accumulate); a replay "
            "trains whole batches"
        )
    return identity


def _begun(run: str, step: int) -> tuple[int, str, dict[str, Any]]:
    """Returns the step of the newest checkpoint before a step (0: none), its path, and what the run was at that step.

    A run may have been resumed with other choices: those of the step stand in the next checkpoint, or, if there is
    none, in config.json; what it trained stands in the newest checkpoint before.

    Raises:
        UserError: if there is no run that can be used.
    """
    from kerasdp.checkpoint import files
    from kerasdp.checkpoint.storage import is_url

    if step < 1:
        raise UserError(f"--step: expected a step of the run, from 1. Received: {step}")
    known: dict[str, Any] | None = None
    folder = inner if os.path.isdir(inner := os.path.join(run, CHECKPOINTS)) else run
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(os.path.join(run, "config.json")) as file:
        config = json.load(file)
        known = {"config": config, "saved_by": {"backend": config["backend"], "devices": config["num_devices"]}}
        folder = str(config.get("checkpoint_dir") or folder)
    if is_url(folder) and folder != run:  # which a file chose
        raise UserError(f"--checkpoint: the checkpoints of {run} are in {redacted(folder)}: give that, if you trust it")
    paths = files.paths_in(folder) if is_url(folder) or os.path.isdir(folder) else []
    number = {path: int(re.sub(r"\D", "", path.rpartition("step-")[2])) for path in paths}
    newer = [path for path in paths if number[path] >= step][-1:]
    for path in (*newer, *(path for path in paths if number[path] < step)):
        try:
            state = files.load(path).state
            files.require(path, state, "config", "saved_by")
        except CheckpointError as error:
            report.warn(f"{error}; trying the one before it")
            continue
        if path not in newer:
            return number[path], path, (known or state) | {"identity": state.get("identity")}
        known = state
    if known is None:
        raise UserError(f"--checkpoint: expected the --workdir of a run. Received: {run!r}")
    return 0, run, known


def _choices(saved: dict[str, Any], request: Request, path: str) -> dict[str, Any]:
    """Returns the choices of a run that its replay has, too.

    Raises:
        UserError: if the file names code, which nobody else does.
    """
    known = choices_of(Config)
    given = {name: value for name, value in saved["config"].items() if name in known and name not in _NOT_REPLAYED}
    found = {name: value for name, value in given.items() if value is not None}
    found |= {name: value for name in ("model", "dataset", "data_dir") if (value := getattr(request, name)) is not None}
    for name in _CODE:
        value = found.get(name)
        if not isinstance(value, str) or not spec.is_user_function(spec.parse(value, name)[0]):
            continue
        if not request.trust_checkpoint and getattr(request, name, None) != value:
            raise UserError(
                f"--{name}: {path} names {ascii(value)[1:-1]:.200}, which is code that whoever wrote the file chose; "
                "add --trust_checkpoint to run it"
            )
    return found


class _Done(BaseException):
    """Leaves the training after the step."""


def _replayed(
    train: Callable[[Any], Any], step: int, num_blamed: int, identity: dict[str, Any] | None, runner: Any
) -> dict[str, Any] | None:
    """Runs in every worker; returns what was found of the step, None if the training ended before it."""
    runner.state.expected_identity = identity
    recorder = _Recorder(runner.state, step, num_blamed)
    runner.state.observe(recorder)
    with contextlib.suppress(_Done):
        train(runner)
        return None
    return recorder.found | {"way": f"{runner.config.backend} x {runner.devices.count}"}


class _Recorder:
    """An observer, which records one step: once to look into it, and then as the run trains it.

    What looks into a step is another program, which may round otherwise.

    Attributes:
        found: fields of `Replayed`.
    """

    detail = Detail.NOTHING

    def __init__(self, state: Any, step: int, num_blamed: int):
        self._state, self._step, self._num_blamed = state, step, num_blamed
        self.found: dict[str, Any] = {}
        self._read: Callable[[], dict[str, np.ndarray]] = dict

    def before_step(self, loop: Any, batch: Any) -> None:
        """Looks into the step, and puts all variables back."""
        from kerasdp.backends.observer import Observer
        from kerasdp.checkpoint import state as training_state
        from kerasdp.checkpoint.names import GROUPS
        from kerasdp.keras_compat.models import own_steps

        if self._state.step != self._step - 1:
            return
        model = loop.model
        if "train_step" in own_steps(model):
            raise UserError(f"replay: {model.name} has a train_step of its own, into which nothing can look")
        if self._num_blamed and loop.strategy.num_devices > 1:
            raise UserError(f"--blame needs one device. Received: {loop.strategy.num_devices}; add --devices=1")
        known = training_state.variables_of(model)
        arrays = dict(zip(known, loop.strategy.read(model, list(known.values()), training_state.to_numpy)))

        def put_back() -> None:
            training_state.restore(model, arrays, GROUPS)

        self._read = functools.partial(_whole, loop.strategy, model)
        self.found |= {"before": self._read(), "epoch": self._state.epoch + 1}
        observer = Observer(0)
        trained = loop.functions.train(batch, Detail.EVERYTHING)
        observer.on_step(trained.loss, batch.indices, trained.observed)
        of_inputs = [name for name in observer.outputs if re.match(r"inputs\b", name)]
        gradients = zip(model.trainable_weights, observer.gradients)
        self.found |= {
            "learning_rate": None if trained.learning_rate is None else float(trained.learning_rate),
            "inputs": {name: observer.outputs[name] for name in of_inputs},
            "outputs": {name: array for name, array in observer.outputs.items() if name not in of_inputs},
            "gradients": {weight.path: gradient for weight, gradient in gradients if gradient is not None},
        }
        if loop.strategy.num_devices == 1:
            self.found["targets"] = _by_name("targets", batch.targets)
        if self._num_blamed:
            put_back()
            self.found["shares"] = _shares(model, batch, observer.gradients, self._num_blamed, put_back)
        put_back()

    def on_step(self, loss: Any, samples: Any, seen: dict[str, Any]) -> None:
        """Takes the loss of the step, and ends the training."""
        import keras

        if self._state.step == self._step:
            places = np.array(keras.ops.convert_to_numpy(samples))
            self.found |= {"loss": float(loss), "samples": places, "after": self._read()}
            raise _Done


def _whole(strategy: Any, model: Any) -> dict[str, np.ndarray]:
    """Returns the weights of a model by their paths, also those that are held in parts."""
    from kerasdp.checkpoint.state import to_numpy

    arrays = strategy.read(model, model.variables, to_numpy)
    return {variable.path: array for variable, array in zip(model.variables, arrays)}


def _by_name(name: str, structure: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of a structure by names."""
    import keras

    leaves = [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]
    arrays = [np.array(keras.ops.convert_to_numpy(leaf)) for leaf in leaves]
    return {name if len(arrays) == 1 else f"{name} {number}": array for number, array in enumerate(arrays, 1)}


def _shares(model: Any, batch: Any, gradients: list[Any], count: int, put_back: Callable[[], None]) -> list[Share]:
    """Returns what samples did to a step: of those that added most to the loss, the first `count`.

    A sample whose inputs or loss are no numbers comes first. With batch norm its numbers are in all outputs.

    Args:
        model: on one device, with the weights of before the step.
        batch: of the step.
        gradients: of the step's loss, for each trainable weight an array or None.
        count: of samples.
        put_back: gives variables, seeds of random layers among them, the values of before the step.
    """
    import keras

    inputs, targets, weights, indices = batch
    number = len(indices)
    if all(leaf is None for leaf in keras.tree.flatten(weights)):
        weights = None
    if isinstance(inputs, (list, tuple)) and len(inputs) == 1:  # as TensorFlow gives one
        inputs = inputs[0]
    training = {"training": True} if "training" in model.call_signature_parameters else {}

    def alone(row: int) -> float:
        """The loss of one sample, where those of others are no numbers: 0 times them would be none."""
        rows = [
            keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[row : row + 1], structure)
            for structure in (inputs, targets, outputs, weights)
        ]
        return (_number(model.compute_loss(*rows, training=True)) - rest) / number

    def own_loss(row: int) -> Any:
        outputs = model(inputs, **training)
        return model.compute_loss(inputs, targets, outputs, _only(row, number, weights, outputs), training=True)

    outputs = model(inputs, **training)  # with the masks that layers have left at them
    rest = sum(map(_number, model.losses))
    # Keras (3.15) multiplies weights by masks in place, on torch.
    copies = None if weights is None else keras.tree.map_structure(keras.ops.copy, weights)
    total = _number(model.compute_loss(inputs, targets, outputs, copies, training=True)) - rest
    places = np.asarray(keras.ops.convert_to_numpy(indices))
    if not np.isfinite(total):
        return _odd_ones(inputs, np.array([alone(row) for row in range(number)]), places)[:count]
    of_each = (_only(row, number, weights, outputs) for row in range(number))
    own = (model.compute_loss(inputs, targets, outputs, weight, training=True) for weight in of_each)
    losses = np.array([_number(loss) - rest for loss in own])
    if not np.isclose(losses.sum(), total, rtol=1e-3, atol=1e-6):
        added = f"alone they are {losses.sum():.6g}, together {total:.6g}"
        raise UserError(f"--blame: the loss of {model.name} is no sum of what samples add: {added}")

    def part_of(row: int) -> float:
        put_back()  # so that each pass draws the random numbers of the step
        return _part_of(gradients, model, functools.partial(own_loss, row))

    of_rest = part_of(-1) if rest else 0.0
    order = np.argsort(-np.abs(losses), kind="stable")[:count]
    parts = {int(row): part_of(int(row)) - of_rest for row in order}
    return [Share(sample=int(places[row]), loss=float(losses[row]), gradient=part) for row, part in parts.items()]


def _only(row: int, number: int, weights: Any, outputs: Any) -> Any:
    """Returns the weights of samples (None: all 1), but for one of them 0; -1: for all."""
    import keras
    from keras import ops

    chosen = ops.convert_to_tensor(np.arange(number) == row, keras.config.floatx())

    def of(leaf: Any) -> Any:
        return leaf * ops.reshape(ops.cast(chosen, leaf.dtype), (-1, *[1] * (len(leaf.shape) - 1)))

    if weights is None:  # of each token, say, where there are outputs of each
        shapes = keras.tree.map_structure(lambda leaf: tuple(leaf.shape[: max(len(leaf.shape) - 1, 1)]), outputs)
        weights = keras.tree.map_shape_structure(ops.ones, shapes)
    return keras.tree.map_structure(of, weights)


def _odd_ones(inputs: Any, losses: np.ndarray, places: np.ndarray) -> list[Share]:
    """Returns all samples of a step whose loss is no number, those first that are none themselves."""
    import keras

    leaves = [keras.ops.convert_to_numpy(leaf).reshape(len(losses), -1) for leaf in keras.tree.flatten(inputs)]
    is_odd = np.any(
        [~np.isfinite(leaf).all(1) for leaf in leaves if leaf.dtype.kind == "f"] or [losses != losses], axis=0
    )
    sizes = np.nan_to_num(np.abs(losses), nan=np.inf)
    order = np.lexsort((-sizes, ~is_odd))
    return [Share(sample=int(places[row]), loss=float(losses[row]), gradient=np.nan) for row in order]


def _number(tensor: Any) -> float:
    from keras import ops

    return float(ops.convert_to_numpy(ops.stop_gradient(ops.convert_to_tensor(tensor))))


def _part_of(whole: list[Any], model: Any, loss: Callable[[], Any]) -> float:
    """Returns how long the gradient of a loss is along a whole one, as a part of that one's length."""
    from keras import ops

    from kerasdp.portability.gradients import value_and_grad

    _, own = value_and_grad(loss, model.trainable_weights)()
    pairs = [
        (ops.convert_to_numpy(ops.cast(each, "float32")).astype("float64"), other.astype("float64"))
        for each, other in zip(own, whole)
        if each is not None and other is not None
    ]
    length = sum(np.square(other).sum() for _, other in pairs)
    return float(sum((each * other).sum() for each, other in pairs) / length) if length else 0.0
