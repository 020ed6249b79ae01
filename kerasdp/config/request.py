"""Defines what an evaluation or a prediction is asked for."""

import dataclasses
import importlib.util
import os

from kerasdp.errors import UserError

ACTIVATIONS = ("softmax", "sigmoid", "none")
OUTPUT_ENDINGS = (".npy", ".csv", ".parquet")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Which model is used on what.

    Args:
        checkpoint: the model: the workdir of a run, a folder or URL of checkpoints, or one file: `.safetensors`,
            `.keras` or `.weights.h5`.
        workdir: folder for what is written.
        model: a built-in model, or a user-defined function, that makes the model of which the file has the weights.
            None: the file says it.
        inputs: an image, a folder of images, `.npy` or `.npz`. None: a data set.
        dataset: whose held-out part is used, as in `kerasdp.Config`. None: that of the run.
        data_dir: folder of its files.
        activation: what makes probabilities of outputs: `"softmax"`, `"sigmoid"`, `"none"`. None: softmax, unless the
            model's last layer has an activation.
        trust_checkpoint: whether a function that the checkpoint names as its model or data set is run, which is its
            author's code. Otherwise it is taken from `model` and `dataset` alone.
        output: file for the predictions; its ending says how they are written. None: `predictions.csv` in `workdir`.

    Raises:
        UserError: if a value is out of its range.
    """

    checkpoint: str
    workdir: str = "."
    model: str | None = None
    inputs: str | None = None
    dataset: str | None = None
    data_dir: str | None = None
    activation: str | None = None
    trust_checkpoint: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        if self.activation not in (None, *ACTIVATIONS):
            raise UserError(f"--activation: expected one of {', '.join(ACTIVATIONS)}. Received: {self.activation!r}")
        if self.inputs is not None and not os.path.exists(self.inputs):
            raise UserError(f"--inputs: there is no file or folder {self.inputs!r}")
        if not self.output_path.endswith(OUTPUT_ENDINGS):
            raise UserError(
                f"--output: expected a file that ends in {', '.join(OUTPUT_ENDINGS)}. Received: {self.output!r}"
            )
        if self.output_path.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
            raise UserError(
                "--output: .parquet is written by pyarrow, which is missing: pip install 'kerasdp[parquet]'"
            )

    @property
    def output_path(self) -> str:
        """Returns where the predictions are written."""
        return self.output or os.path.join(self.workdir, "predictions.csv")
