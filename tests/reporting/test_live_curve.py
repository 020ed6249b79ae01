"""Curves that are shown while a run trains: one figure for each fit in a notebook's kernel."""

import base64
import os
import pty
import sys

import keras
import nbclient
import nbformat
import pytest

import kerasdp
from tests.helpers import BACKENDS, ROOT, environment

TRAIN = """
import time

import numpy as np

import kerasdp


def train(runner):
    import keras

    # Longer than the notebook waits between its looks.
    slow = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: time.sleep(0.5))
    x = np.random.RandomState(0).rand(40, 3).astype("float32")
    for _ in range(2):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(x, x.sum(axis=1), batch_size=10, epochs=3, callbacks=[slow])
"""


@pytest.mark.parametrize("verbose", [None, 0])
def test_a_terminal_says_at_once_what_starts(verbose, monkeypatch):
    """The frameworks take ten seconds or more to start; a file of errors does not get the line."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert kerasdp.launch(lambda runner: 3, device="cpu", verbose=verbose) == 3
        stderr.write("end")
        stderr.flush()
        received = b""
        while not received.endswith(b"end"):
            received += os.read(ours, 100)
    os.close(ours)
    assert received.decode() == ("" if verbose == 0 else f"starting {keras.config.backend()} ...\r\n") + "end"


# torch on two devices trains in other processes than the kernel's, jax in the kernel's own.
CASES = [("torch", 2), ("jax", 2), ("tensorflow", 2), ("torch", 1)]


@pytest.mark.proof
@pytest.mark.parametrize(("backend", "count"), [case for case in CASES if case[0] in BACKENDS])
def test_a_figure_for_each_fit_in_a_notebook(backend, count, tmp_path):
    """It is redrawn in place: one output of the cell for each of two fits, though each has three epochs."""
    launch = f"kerasdp.launch(train, num_devices={count}, device='cpu')"
    cells = [TRAIN, launch, launch.replace(")", ", verbose=2)")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    env = environment(KERAS_BACKEND=backend, PYTHONPATH=str(ROOT))
    env.pop("PYTEST_CURRENT_TEST")  # under which ipykernel (7) leaves alone what other processes print
    updates = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, cell_index):
            updates.append(message["msg_type"])
            return super().process_message(message, cell, cell_index)

    Client(notebook, timeout=200).execute(env=env, cwd=str(tmp_path))
    shown = [[output for output in cell.outputs if "image/png" in output.get("data", {})] for cell in notebook.cells]
    assert [len(figures) for figures in shown] == [0, 2, 0]
    for figure in shown[1]:
        assert base64.b64decode(figure["data"]["image/png"]).startswith(b"\x89PNG")
    text = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert text.count("epoch 3/3") == 2
    assert updates.count("update_display_data") >= 1
