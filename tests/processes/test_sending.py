"""Functions are sent to worker processes wherever they are from, or refused in a line before any starts."""

import functools
import operator
import os
import re
import runpy
import sys
import threading
import types

import keras
import numpy as np
import pytest

from kerasdp.errors import UserError
from kerasdp.processes.sending import sent
from kerasdp.processes.workers import run_workers
from tests.helpers import BACKENDS, PROGRAMS, result_of, run


def called(function):
    """What a function returns in a new process."""
    return run_workers(operator.call, (function,), names=["it"])


LOSSES = [1.523931, 1.517146]  # of callers.py, on any backend and number of devices
lock = threading.Lock()


def trained(done):
    """The script's top ran once, what `train` printed is shown once, and nothing was said of it."""
    losses = result_of(done)
    np.testing.assert_allclose(losses, LOSSES, rtol=0, atol=1e-5)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("RESULT")]
    assert lines == ["the top of the script", "trained by the chief"]


@pytest.mark.proof
@pytest.mark.parametrize("restarts", [(), (1,)], ids=["", "may be restarted"])
def test_a_script_without_a_guard(backend, restarts, tmp_path):
    trained(run(PROGRAMS / "callers.py", backend, 2, tmp_path / "run", *restarts, backend=backend))


WAYS = {
    "by exec": "import sys; path = sys.argv.pop(1); exec(compile(open(path).read(), path, 'exec'), {'__name__': 'a'})",
    "by another name": "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='another')",
}


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch starts a process for each device")
@pytest.mark.parametrize("way", WAYS)
def test_a_script_that_is_run_otherwise(way, tmp_path):
    trained(run("-c", WAYS[way], PROGRAMS / "callers.py", "torch", 2, tmp_path, KERAS_BACKEND="torch"))


def test_what_a_function_refers_to_comes_with_it(tmp_path):
    """Arrays by way of a file, and those that lie in a file already as its name."""
    array, number = np.arange(100_000).reshape(1000, 100), 3
    mapped = np.memmap(tmp_path / "mapped", dtype="float32", mode="w+", shape=(50, 20))
    mapped[:] = np.arange(1000).reshape(50, 20)
    part, few = mapped[10:], [np.float32([size] * size) for size in range(5)]

    def look():
        array[0] = 7
        place = type(part).__name__, str(part.filename), float(part[0, 1]), part.shape
        return array[[0, -1], -1].tolist(), number, *place, [one.tolist() for one in few]

    found = called(look)
    rows = [[size] * size for size in range(5)]
    assert found == ([7, 99_999], 3, "memmap", str(tmp_path / "mapped"), 201.0, (40, 20), rows)
    assert array[0, 0] == 0
    with sent(look) as ready:
        assert len(ready._pickled) < 10_000
        assert array.nbytes < os.path.getsize(ready._path) < array.nbytes + 1000
    assert not os.path.exists(ready._path)


def test_a_module_that_no_worker_can_import(tmp_path):
    """What `runpy` runs by another name; with what the body of a class refers to."""
    text = "def base(): return 40\ndef function():\n    class Of:\n        value = base()\n    return Of.value + 2\n"
    (tmp_path / "hidden.py").write_text(text)
    sys.modules["hidden"] = module = types.ModuleType("hidden")
    module.__file__ = str(tmp_path / "hidden.py")
    try:
        exec(text, vars(module))
        assert called(module.function) == 42
    finally:
        del sys.modules["hidden"]
    assert called(runpy.run_path(str(tmp_path / "hidden.py"))["function"]) == 42


def holder_of(value):
    def train(runner):
        return value

    return train


def small_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def calls_another(used):
    def helper():
        return used

    return lambda runner: helper()


REFUSED = {
    "lock": (lambda: lambda runner: lock, "lock, which the lambda refers to, is a lock and cannot be sent"),
    "called": (lambda: calls_another(lock), "used, which helper refers to, is a lock and cannot be sent"),
    "default": (lambda: lambda runner, one=lock: one, "the lambda cannot be sent to worker processes (cannot pickle"),
    "partial": (lambda: functools.partial(print, file=open(os.devnull, "w")), "file, which print refers to, is a Text"),  # noqa: SIM115
    "generator": (lambda: holder_of(n for n in "ab"), "value, which train refers to, is a generator and cannot"),
    "model": (lambda: holder_of(small_model()), "value, which train refers to, was made before kerasdp.launch: make"),
    "metric": (lambda: holder_of([keras.metrics.Mean()]), "value, which train refers to, was made before"),
    "variable": (lambda: holder_of(keras.Variable(1.0)), "value, which train refers to, was made before"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sent_is_named(case):
    make, words = REFUSED[case]
    with pytest.raises(UserError, match=re.escape(words)) as refused, sent(make()):
        pass
    assert "\n" not in str(refused.value)


@pytest.mark.proof
def test_data_of_tensorflow_made_before_launch_is_told(tmp_path):
    pytest.importorskip("tensorflow")
    done = run(PROGRAMS / "data_before.py", backend="torch")
    assert result_of(done) == [4.0]
    line = "warning: data, which train refers to, is a tf.data.Dataset made before kerasdp.launch. "
    assert [text.startswith(line) for text in done.stderr.splitlines() if text.startswith("warning")] == [True]


@pytest.mark.proof
def test_nothing_starts_when_train_cannot_be_sent():
    code = (
        "import threading, kerasdp, torch.multiprocessing as m\n"
        "lock = threading.Lock()\n"
        "def never(*_, **__): raise AssertionError('it started')\n"
        "m.start_processes = never\n"
        "try: kerasdp.launch(lambda runner: lock, backend='torch', num_devices=2, device='cpu')\n"
        "except kerasdp.UserError as error: print(error)\n"
    )
    done = run("-c", code)
    assert done.stdout.startswith("lock, which the lambda refers to, is a lock and cannot be sent"), done.stderr
