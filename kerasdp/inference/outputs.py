"""Makes probabilities of a model's outputs, and writes them to files."""

import csv
import os
from typing import Any

import numpy as np

from kerasdp.errors import UserError
from kerasdp.inference.samples import Samples
from kerasdp.inference.trained import Trained
from kerasdp.reporting.comparison import plain_cell


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
