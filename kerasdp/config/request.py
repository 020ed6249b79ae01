"""Defines what an evaluation or a prediction is asked for."""

import dataclasses
import importlib.util
import os

from kerasdp.config.choices import (
    FOLDER,
    SWITCH,
    Range,
    check_ranges,
    choice,
    documented,
    normalize,
    one_of,
    path_as_text,
)
from kerasdp.errors import UserError

ACTIVATIONS = ("softmax", "sigmoid", "none")
OUTPUT_ENDINGS = (".npy", ".csv", ".parquet")
GROUP = "Evaluation and prediction"


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Which model is used on what. What is written goes into the folder `workdir`.

    Raises:
        UserError: if a value is out of its range.
    """

    # fmt: off
    checkpoint: str = choice("", GROUP, Range("the --workdir of a run, a checkpoint, or a .keras file"),
        "Model to use: the --workdir of a run, a folder or URL of checkpoints, or one file: .safetensors (a "
        "checkpoint), .keras or .weights.h5, of any backend.", convert=path_as_text)
    inputs: str | None = choice(None, GROUP, Range("a file or a folder"),
        "Instead of --dataset: an image, a folder of images (with a sub-folder for each class, or without), .npy, or "
        ".npz with x and, for labels, y.", "a data set", convert=path_as_text)
    model: str | None = choice(None, GROUP, Range("a name, or file.py:function"),
        "Built-in model, or your own function, that makes the model of which the file has the weights.",
        "the one that the file names")
    dataset: str | None = choice(None, GROUP, Range("a name, or file.py:function"),
        "Data set whose held-out samples are used.", "that of the run")
    data_dir: str | None = choice(None, GROUP, FOLDER, "Folder of the data set's files.",
        "that of the run", convert=path_as_text)
    activation: str | None = choice(None, GROUP, one_of(*ACTIVATIONS),
        "softmax, sigmoid or none: what makes probabilities of the model's outputs.",
        "softmax, unless its last layer has an activation")
    trust_checkpoint: bool = choice(False, GROUP, SWITCH,
        "Run the code that a checkpoint names as its model or data set; otherwise only what --model and --dataset name "
        "is run.")
    output: str | None = choice(None, GROUP,
        Range(f"a file that ends in {', '.join(OUTPUT_ENDINGS)}", lambda path: path.endswith(OUTPUT_ENDINGS)),
        "File for the predictions: .npy, .csv or .parquet.", "predictions.csv in --workdir",
        convert=path_as_text)
    # fmt: on
    workdir: str = "."

    def __post_init__(self) -> None:
        normalize(self)
        check_ranges(self)
        if not self.checkpoint:
            raise UserError("--checkpoint is needed: the --workdir of a run, a checkpoint, or a .keras file")
        if self.inputs is not None and not os.path.exists(self.inputs):
            raise UserError(f"--inputs: there is no file or folder {self.inputs!r}")
        if self.output_path.endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
            raise UserError(
                "--output: .parquet is written by pyarrow, which is missing: pip install 'kerasdp[parquet]'"
            )

    @property
    def output_path(self) -> str:
        """Returns where the predictions are written."""
        return self.output or os.path.join(self.workdir, "predictions.csv")
