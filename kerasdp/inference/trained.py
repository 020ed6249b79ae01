"""Loads trained models, from checkpoints of runs and from Keras' files, and opens what they are used on."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, cast

import keras
import numpy as np

from kerasdp.checkpoint import files
from kerasdp.checkpoint import state as training_state
from kerasdp.checkpoint.files import Checkpoint, require
from kerasdp.checkpoint.state import build_architecture, load_keras_file
from kerasdp.checkpoint.storage import is_url
from kerasdp.config import Config, Request, spec
from kerasdp.config.validation import DATASETS, MODELS
from kerasdp.config.workdir import CHECKPOINTS
from kerasdp.data.datasets import load_data
from kerasdp.data.sources import IMAGE_ENDINGS, ArraySource, ImageFolder, Source, list_images
from kerasdp.errors import CheckpointError, UserError, redacted
from kerasdp.keras_compat.models import as_functional, last_activation
from kerasdp.keras_compat.saving import safe_deserialization
from kerasdp.models import build_model
from kerasdp.portability.portable import portable
from kerasdp.reporting import report

_WITH_MODEL = "name the function that builds it: --model=FILE.py:FUNCTION"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A model with the weights of a file.

    Args:
        model: to evaluate or predict with.
        path: the file.
        dataset: what the run trained on, as the file says: a name to be shown, to `_named_by_file` before it is loaded.
            None where the file does not say it. So is `data_dir`.
        data_dir: folder of its files.
        kind: what the outputs are, once `applied` is: `"softmax"`, probabilities of classes; `"sigmoid"`, each a
            probability of its own; `"none"`, anything.
        applied: whether `kind` has to be applied to the outputs, since they are logits.
    """

    model: keras.Model
    path: str
    dataset: str | None
    data_dir: str | None
    kind: str
    applied: bool


def load_trained(request: Request, warn: Callable[[str], None] = report.warn) -> Trained:
    """Loads the model of a request: call it within `runner.scope()`.

    Of a folder of checkpoints the newest is taken that can be used. It holds the layers of a functional or Sequential
    model; another model is built by `request.model`, for the shape and the classes of the data set.

    Args:
        request: `checkpoint`, `model`, `dataset`, `data_dir`, `activation` and `trust_checkpoint` are read.
        warn: called for each checkpoint that cannot be used.

    Raises:
        UserError: if there is no such file, the model in it cannot be built here, or it takes code that the file names
            and nobody else.
    """
    path, model, run = _loaded(request, warn)
    kind, applied = _kind_of(model, request.activation)
    dataset, data_dir = run.get("dataset"), run.get("data_dir")
    return Trained(model=model, path=redacted(path), dataset=dataset, data_dir=data_dir, kind=kind, applied=applied)


def _loaded(request: Request, warn: Callable[[str], None]) -> tuple[str, keras.Model, dict[str, Any]]:
    """Returns the path of a request's file, its model, and the choices of the run that wrote it, if one did."""
    place = request.checkpoint
    if place.endswith((".keras", ".weights.h5")) and not is_url(place):
        _require(place)
        return place, _load_keras_file(request), {}
    path, saved = _find(place, warn)
    return path, _restored(path, saved, request), saved.state["config"]


def load_pretrained(
    config: Config,
    *,
    preset: str | None = None,
    task: str = "TextClassifier",
    weights: str = "",
    model: str | None = None,
) -> tuple[keras.Model, Any, Any]:
    """Loads a trained model that gives logits, and data to fine-tune it on: call it within `runner.scope()`.

    Args:
        config: `dataset` and `data_dir` are read.
        preset: of KerasHub: a name, which is downloaded, or a folder that `save_to_preset` wrote. None: `weights`.
        task: the class of `keras_hub.models` as which it is loaded.
        weights: as `Request.checkpoint`.
        model: as `Request.model`.

    Returns:
        The model, `(x, y)` to train on, and `(x, y)` to evaluate on. Where they are texts, the model preprocesses them.

    Raises:
        UserError: if the model or the data cannot be had.
    """
    train, test, num_classes = _pairs(config)
    if preset is not None:
        return _from_preset(preset, task, train[0], num_classes), train, test
    request = Request(checkpoint=weights, model=model, dataset=config.dataset, data_dir=config.data_dir)
    try:
        path, loaded, _ = _loaded(request, report.warn)
    except UserError as error:
        raise UserError(str(error).replace("--checkpoint:", "--weights:")) from error
    outputs = getattr(as_functional(loaded), "outputs", [None])
    if any(last_activation(symbol)[1] in ("softmax", "sigmoid") for symbol in outputs):
        raise UserError(
            f"--weights: expected a model that gives logits. Received: {path}, whose last layer has an activation; "
            "copy the recipe, and change its loss"
        )
    return loaded, train, test


def _pairs(config: Config) -> tuple[tuple[Any, Any], tuple[Any, Any], int]:
    """Returns inputs and targets to train and to evaluate on, and the number of classes."""
    name, arguments = spec.parse(config.dataset, "dataset")
    if not spec.is_user_function(name):
        data = load_data(config)
        return (data.train, None), (data.test, None), data.num_classes
    found = spec.load_user_function(name, "dataset")(**arguments)
    try:
        (x, y), (x_test, y_test) = found
    except (TypeError, ValueError) as error:
        raise UserError(f"--dataset: {name} must return (x_train, y_train), (x_test, y_test): {error}") from error
    is_class = y is not None and np.issubdtype(np.asarray(y).dtype, np.integer)
    return (x, y), (x_test, y_test), int(np.max(y)) + 1 if is_class else 0


def _from_preset(preset: str, task: str, x: Any, num_classes: int) -> keras.Model:
    try:
        import keras_hub
    except ImportError as error:
        raise UserError(f"--preset: KerasHub is not installed ({error}): pip install keras-hub") from error
    kind = getattr(keras_hub.models, task, None)
    if not (isinstance(kind, type) and issubclass(kind, keras_hub.models.Task)):
        tasks = [
            name
            for name, one in vars(keras_hub.models).items()
            if keras_hub.models.Task in getattr(one, "__bases__", ())
        ]
        raise UserError(f"--task: expected a task of KerasHub: {', '.join(sorted(tasks))}. Received: {task!r}")
    options: dict[str, Any] = {"num_classes": num_classes} if "Classifier" in task else {}
    first = keras.tree.flatten(x)[0] if not hasattr(x, "num_samples") else None
    if first is None or not (isinstance(first, str) or np.asarray(first).dtype.kind in "OSU"):
        options["preprocessor"] = None
    try:
        return cast(Any, kind).from_preset(preset, **options)
    except Exception as error:  # of the network, of files, of classes that do not fit
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"--preset: {task} cannot be made of {preset!r} ({line:.300}); give another --task, or a folder that "
            "save_to_preset wrote"
        ) from error


def _named_by_file(name: str, kind: str, path: str, request: Request) -> str:
    """Returns a name that a file gives to its model or data set, if that is a built-in one, or the file is trusted.

    A user-defined function is code, and the author of the file chose it.

    Args:
        name: as the file has it.
        kind: `"model"` or `"dataset"`.
        path: of the file.
        request: says whether the file is trusted.

    Raises:
        UserError: if it is neither.
    """
    built_in = {"model": MODELS, "dataset": DATASETS}[kind]
    if spec.parse(name, kind)[0] in built_in:
        return name
    if not request.trust_checkpoint:
        raise UserError(
            f"--{kind}: {redacted(path)} names {ascii(name)[1:-1]:.200}, which is code that whoever wrote the file "
            f"chose; name it yourself (--{kind}=FILE.py:FUNCTION), or add --trust_checkpoint to run it"
        )
    print(f"runs {ascii(name)[1:-1]}: the {kind} that {redacted(path)} names (--trust_checkpoint)", flush=True)
    return name


def _require(place: str) -> None:
    if not os.path.exists(place):
        raise UserError(f"--checkpoint: there is no file or folder {place!r}")


def _find(place: str, warn: Callable[[str], None]) -> tuple[str, Checkpoint]:
    """Returns path and content of a checkpoint, or of the newest of a folder; it says what its run was."""
    if not is_url(place):
        _require(place)
    inner = os.path.join(place, CHECKPOINTS)
    try:
        if place.endswith(".safetensors"):
            found: tuple[str, Checkpoint] | None = (place, files.load(place))
        else:
            found = files.load_newest(inner if os.path.isdir(inner) else place, warn)
        if found is not None:
            require(found[0], found[1].state, "config")
    except NotADirectoryError:
        raise UserError(
            f"--checkpoint: expected a workdir, a folder of checkpoints, .safetensors, .keras or .weights.h5. "
            f"Received: {place!r}"
        ) from None
    except (CheckpointError, UserError) as error:
        raise UserError(f"--checkpoint: {str(error).removeprefix('--resume: ')}") from error
    if found is None:
        raise UserError(
            f"--checkpoint: expected checkpoints in {place!r}, or in its folder {CHECKPOINTS}. Received: none"
        )
    return found


def _restored(path: str, saved: Checkpoint, request: Request) -> keras.Model:
    if saved.state["config"].get("checkpoint_weights", "all") != "all":
        raise UserError(
            f"--checkpoint: {path} holds the weights that trained, and not the others (--checkpoint_weights=trained); "
            "resume its run with --export=FILE.keras, and use that file"
        )
    run, architecture = saved.state["config"], {} if request.model else saved.state.get("architecture") or {}
    if architecture:
        is_own, instead = spec.is_user_function(run["model"]), _WITH_MODEL
        if is_own:
            instead += f", as its run did ({ascii(run['model'])[1:-1]:.200}), or add --trust_checkpoint"
        try:
            model = _tried(lambda: build_architecture(architecture), path, instead)
        except UserError:
            if not (request.trust_checkpoint and is_own):
                raise
            model = _build(request, path, run)  # which knows user-defined layers
    else:
        model = _build(request, path, run)
    portable(model)  # random layers then have the seeds that the checkpoint holds
    try:
        training_state.restore(model, saved.arrays, ("model",))
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"--checkpoint: {path}: {error}; {_WITH_MODEL}") from error
    return model


def _build(request: Request, path: str, run: dict[str, Any] | None) -> keras.Model:
    """Builds the model that a request or a run names, for the data set's shape and classes."""
    name = request.model or _named_by_file((run or {})["model"], "model", path, request)
    dataset = request.dataset
    if dataset is None and run is not None:
        dataset = _named_by_file(run["dataset"], "dataset", path, request)
    if dataset is None:
        raise UserError(
            "--model: shape and classes of the model are those of a data set, which a .keras file does not name; add "
            "--dataset (a function of yours: --dataset=FILE.py:FUNCTION) instead of --inputs"
        )
    data = load_data(Config(dataset=dataset, data_dir=request.data_dir or (run or {}).get("data_dir")))
    model = build_model(Config(model=name), data.input_shape, data.num_classes)
    if not model.built:
        model(np.zeros((1, *data.input_shape), "float32"))
    return model


def _load_keras_file(request: Request) -> keras.Model:
    path = request.checkpoint
    if request.model is None and path.endswith(".weights.h5"):
        raise UserError(f"--checkpoint: {path} has weights alone; {_WITH_MODEL}, or a built-in model, and --dataset")
    if request.model is None:
        return _tried(lambda: load_keras_file(path), path, f"if its layers are yours, {_WITH_MODEL}")
    model = _build(request, path, None)
    _tried(lambda: model.load_weights(path), path, "check that --model builds what was saved")
    return model


def _tried(action: Callable[[], Any], path: str, instead: str) -> Any:
    """Returns what Keras returns; it may raise anything of a file, most of it in many lines."""
    try:
        with safe_deserialization():
            return action()
    except Exception as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        reason = line.partition(". ")[0]
        raise UserError(f"--checkpoint: the model of {path} cannot be built ({reason:.300}); {instead}") from error


def _kind_of(model: keras.Model, activation: str | None) -> tuple[str, bool]:
    """Returns what a model's outputs are, or can be made, and whether that has to be applied to them."""
    functional = as_functional(model)
    symbols = [None] if functional is None else functional.outputs
    if len(symbols) > 1:
        raise UserError(f"{model.name}: expected a model with one output. Received: {len(symbols)}")
    own = None if symbols[0] is None else last_activation(symbols[0])[1]
    if own in ("softmax", "sigmoid"):
        if activation in ("softmax", "sigmoid"):
            raise UserError(
                f"--activation={activation}: the last layer of {model.name} has a {own} already; leave it out"
            )
        return own, False
    if activation is not None:
        return activation, activation != "none"
    width = None if symbols[0] is None else symbols[0].shape[-1]
    if own == "linear" and width != 1:
        return "softmax", True
    raise UserError(
        f"{model.name}: its outputs may be logits or anything else: add --activation=softmax, sigmoid, or none (to use "
        "them as they are)"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Samples in a fixed order.

    Args:
        source: the samples, for `runner.evaluate` and `runner.predict`.
        names: of each sample: its file, or its row number.
        title: what they are, in words.
        labels: the class of each, shape `(samples,)`; None if they have none.
        class_names: of the folders; None if classes have numbers only.
    """

    source: Source
    names: list[Any]
    title: str
    labels: np.ndarray | None
    class_names: list[str] | None = None


def open_samples(request: Request, trained: Trained) -> Samples:
    """Opens the inputs of a request, or the held-out part of its data set, else of the one that the model is from.

    Args:
        request: `inputs`, `dataset`, `data_dir` and `trust_checkpoint` are read.
        trained: its model says the size of images.

    Raises:
        UserError: if there is no data, it cannot be read, or it takes code that the model's file names and nobody else.
    """
    path = request.inputs
    if path is None:
        return _of_dataset(request, trained)
    if os.path.isdir(path) or path.lower().endswith(IMAGE_ENDINGS):
        return _of_images(path, trained.model)
    if path.endswith((".npy", ".npz")):
        return _of_arrays(path)
    raise UserError(
        f"--inputs: expected .npy, .npz, a folder of images, or an image ({', '.join(IMAGE_ENDINGS)}). "
        f"Received: {path!r}"
    )


def _of_dataset(request: Request, trained: Trained) -> Samples:
    name = request.dataset
    if name is None and trained.dataset is not None:
        name = _named_by_file(trained.dataset, "dataset", trained.path, request)
    if name is None:
        raise UserError(f"{trained.path} does not say what it was trained on: add --inputs or --dataset")
    own_folder = trained.data_dir if request.dataset is None else None
    data = load_data(Config(dataset=name, data_dir=request.data_dir or own_folder))
    source = data.test
    labels = np.asarray(source.targets(np.arange(source.num_samples))[0])
    names = list(getattr(source, "paths", range(source.num_samples)))
    return Samples(source=source, names=names, title=f"{name}, held-out samples", labels=labels)


def _of_arrays(path: str) -> Samples:
    try:
        found = np.load(path, allow_pickle=False)
        arrays = dict(found) if path.endswith(".npz") else {"x": found}
    except Exception as error:  # of zip, zlib and NumPy: anybody may have written the file
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"--inputs: {path} cannot be read as arrays ({line:.300})") from error
    labels = arrays.pop("y", None)
    inputs = arrays.get("x") if list(arrays) == ["x"] else arrays
    source = ArraySource(inputs, labels)
    if labels is not None:
        labels = labels.reshape(len(labels), -1)
        if labels.shape[1] != 1 or labels.dtype.kind not in "iu":
            raise UserError(
                f"--inputs: expected whole numbers of shape (samples,) as y of {path}. Received: {labels.dtype} of "
                f"shape {labels.shape}"
            )
        labels = labels[:, 0]
        source = ArraySource(inputs, labels)
    return Samples(source=source, names=list(range(source.num_samples)), title=path, labels=labels)


def _of_images(path: str, model: keras.Model) -> Samples:
    shape = getattr(model, "input_shape", None)
    if not isinstance(shape, tuple) or len(shape) != 4 or None in shape[1:]:
        raise UserError(f"--inputs: images need a model with inputs (height, width, channels). Received: {shape}")
    paths, labels, classes = [path], None, None
    if os.path.isdir(path):
        paths = sorted(os.path.join(path, name) for name in os.listdir(path) if name.lower().endswith(IMAGE_ENDINGS))
        has_folders = any(entry.is_dir() for entry in os.scandir(path))
        if paths and has_folders:
            raise UserError(f"--inputs: expected images or sub-folders, one per class. Received: {path!r}, with both")
        if has_folders:
            try:
                paths, labels, classes = list_images(path)
            except UserError as error:
                raise UserError(str(error).replace("--data_dir", "--inputs")) from error
        if not paths:
            raise UserError(f"--inputs: expected images ({', '.join(IMAGE_ENDINGS)}) in {path!r}. Received: none")
    known = np.zeros(len(paths), "int32") if labels is None else labels.astype("int32")
    height, width, channels = shape[1:]
    source = ImageFolder(paths, known, (height, width), channels)
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    names = [os.path.relpath(each, folder) for each in paths]
    return Samples(source=source, names=names, title=path, labels=labels, class_names=classes)
