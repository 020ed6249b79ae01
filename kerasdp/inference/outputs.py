"""Writes what a model gives: its probabilities, and how well it does, class by class."""

import csv
import json
import os
from typing import Any

import numpy as np

from kerasdp.errors import UserError
from kerasdp.inference.trained import Samples, Trained
from kerasdp.reporting.comparison import plain_cell
from kerasdp.reporting.figure import make_figure

# With more classes the numbers in the picture could not be read.
_MOST_WITH_NUMBERS = 20


def confusion_matrix(samples: Samples, outputs: np.ndarray) -> np.ndarray:
    """Counts the samples of each class by the class that is predicted.

    Args:
        samples: with labels.
        outputs: logits or probabilities, shape `(samples, classes)`.

    Returns:
        Whole numbers, shape `(classes, classes)`: row by label, column by prediction.

    Raises:
        UserError: if there are no labels, one is no class of the model, or the folders are other classes than its.
    """
    labels = check_classes(samples, outputs.shape[-1] if outputs.ndim == 2 else 1)
    matrix = np.zeros((outputs.shape[1],) * 2, "int64")
    np.add.at(matrix, (labels, outputs.argmax(axis=-1)), 1)
    return matrix


def check_classes(samples: Samples, num_classes: int) -> np.ndarray:
    """Returns the labels; raises `UserError` unless each is a class of a model that gives `num_classes` outputs."""
    if num_classes < 2:
        raise UserError("an evaluation needs a model with an output for each class, at least 2. Received: another one")
    if samples.labels is None:
        raise UserError(
            f"an evaluation needs labels. Received: {samples.title} without; give a folder with a sub-folder for each "
            "class, or .npz with x and y"
        )
    names = samples.class_names
    if names is not None and len(names) != num_classes:
        raise UserError(
            f"--inputs: expected {num_classes} sub-folders in {samples.title}, one for each class of the model. "
            f"Received: {len(names)}; a class without images needs its sub-folder, too"
        )
    outside = samples.labels[(samples.labels < 0) | (samples.labels >= num_classes)]
    if outside.size:
        raise UserError(
            f"{samples.title}: expected labels from 0 to {num_classes - 1}, the classes of the model. "
            f"Received: {outside[0]}"
        )
    return samples.labels


def write_evaluation(
    folder: str, results: dict[str, float], matrix: np.ndarray, samples: Samples, **facts: Any
) -> dict[str, str]:
    """Writes `evaluation.json`, `confusion.csv` and `confusion.png`; returns their paths.

    Args:
        folder: of the files.
        results: loss and metrics.
        matrix: of `confusion_matrix`.
        samples: their names of classes are written.
        **facts: what else `evaluation.json` should say.

    Raises:
        UserError: if they cannot be written.
    """
    names = samples.class_names or [str(number) for number in range(len(matrix))]
    paths = {name: os.path.join(folder, name) for name in ("evaluation.json", "confusion.csv", "confusion.png")}
    counts = matrix.sum(axis=1)
    of_class = {
        name: {"samples": int(count), "accuracy": float(right / count) if count else None}
        for name, count, right in zip(names, counts, matrix.diagonal())
    }
    try:
        os.makedirs(folder, exist_ok=True)
        with open(paths["evaluation.json"], "w") as file:
            content = {**facts, "data": samples.title, "num_samples": int(matrix.sum()), **results, "classes": of_class}
            json.dump(content, file, indent=2)
            file.write("\n")
        with open(paths["confusion.csv"], "w", newline="", errors="backslashreplace") as file:
            cells = [plain_cell(name) for name in names]
            csv.writer(file).writerows(
                [["label", *cells], *([cell, *row] for cell, row in zip(cells, matrix.tolist()))]
            )
        draw_confusion(matrix, names, paths["confusion.png"])
    except OSError as error:
        raise UserError(f"--workdir: cannot write into {folder!r} ({error.strerror or error})") from error
    return paths


def draw_confusion(matrix: np.ndarray, names: list[str], path: str) -> None:
    """Draws a confusion matrix; the colour of a field is its share of its row.

    Args:
        matrix: whole numbers, shape `(classes, classes)`: row by label, column by prediction.
        names: of the classes.
        path: of the PNG file.
    """
    count = len(matrix)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = min(max(4.6, 0.55 * count + 2), 14)
    figure, (axes,) = make_figure(side + 0.8, side)
    axes.grid(False)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if count <= _MOST_WITH_NUMBERS:
        for row, column in np.ndindex(matrix.shape):
            if matrix[row, column]:
                colour = "white" if shares[row, column] > 0.55 else "#333333"
                axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", color=colour, fontsize=8)
        is_long = max(map(len, names)) > 3
        axes.set_xticks(range(count), names, rotation=45 if is_long else 0, ha="right" if is_long else "center")
        axes.set_yticks(range(count), names)
    right = matrix.trace() / max(matrix.sum(), 1)
    axes.set(xlabel="predicted class", ylabel="label", title=f"{right:.1%} of {matrix.sum():,} samples on the diagonal")
    figure.colorbar(image, ax=axes, label="share of the label's samples", shrink=0.8)
    figure.savefig(path, dpi=120)


def probabilities(outputs: Any, trained: Trained) -> np.ndarray:
    """Returns the outputs as probabilities, if they are logits; else as they are.

    Args:
        outputs: of `runner.predict`, shape `(samples, ..., classes)`.
        trained: says what they are.

    Returns:
        Array of the same shape and type.

    Raises:
        UserError: if there are several outputs.
    """
    if not isinstance(outputs, np.ndarray):
        raise UserError(f"{trained.model.name}: expected one output. Received: a {type(outputs).__name__} of several")
    if not trained.applied:
        return outputs
    logits = outputs.astype("float64")
    if trained.kind == "sigmoid":
        return (0.5 * (1 + np.tanh(0.5 * logits))).astype(outputs.dtype)  # which never overflows
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(outputs.dtype)


def write_predictions(path: str, outputs: np.ndarray, samples: Samples, trained: Trained) -> None:
    """Writes a row for each sample, in their order.

    `.npy`: the outputs. `.csv` and `.parquet`: the sample's file or row number; for classes the predicted one and its
    probability; then all outputs, a column each. In `.csv` an apostrophe goes before a file's name that a spreadsheet
    would take for a formula.

    Args:
        path: ends in `.npy`, `.csv` or `.parquet`.
        outputs: of `probabilities`.
        samples: their names are written.
        trained: says whether outputs are probabilities of classes.

    Raises:
        UserError: if the outputs are no table, or the file cannot be written.
    """
    if outputs.ndim != 2 and not path.endswith(".npy"):
        raise UserError(
            f"--output: expected one row of outputs a sample for {path!r}. Received: shape "
            f"{outputs.shape[1:]} a sample; write .npy"
        )
    try:
        if folder := os.path.dirname(path):
            os.makedirs(folder, exist_ok=True)
        if path.endswith(".npy"):
            np.save(path, outputs)
        else:
            (_write_csv if path.endswith(".csv") else _write_parquet)(path, _columns(outputs, samples, trained.kind))
    except OSError as error:
        raise UserError(f"--output: cannot write {path!r} ({error.strerror or error})") from error


def _columns(outputs: np.ndarray, samples: Samples, kind: str) -> dict[str, Any]:
    """Returns the columns of the table, by their names."""
    columns: dict[str, Any] = {"sample": samples.names}
    if kind == "softmax":
        columns |= {"class": outputs.argmax(axis=-1), "probability": outputs.max(axis=-1)}
    title = "output" if kind == "none" else "probability"
    return columns | {f"{title}_{number}": outputs[:, number] for number in range(outputs.shape[1])}


def _write_csv(path: str, columns: dict[str, Any]) -> None:
    with open(path, "w", newline="", errors="backslashreplace") as file:  # names of files may be no text
        writer = csv.writer(file)
        writer.writerow(columns)
        # Nine digits are a float32 as a whole.
        texts = [
            [f"{each:.9g}" if isinstance(each, np.floating) else plain_cell(each) for each in own]
            for own in columns.values()
        ]
        writer.writerows(zip(*texts, strict=True))


def _write_parquet(path: str, columns: dict[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
