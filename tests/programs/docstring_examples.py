"""Runs examples, each as a program of its own would be run, and tells the error of each that fails.

python docstring_examples.py FILE [--processes]: code by name, in JSON. With --processes kerasdp.parity trains in new
processes, as for users; without it in this one, and equal trainings once.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
import time
import traceback

import numpy as np
from absl import app, flags

import kerasdp
from kerasdp.parity import trace


def in_this_process():
    """Replaces the processes of kerasdp.parity: their backend is the one of this process, whatever they ask for."""
    done = {}

    def call_in(job, way, function, *args):
        data = job.data() if callable(job.data) else job.data
        code = job.build_model.__code__
        choices = [getattr(job, name) for name in vars(job) if name not in ("build_model", "data")]
        arrays = [np.asarray(array).tobytes() for array in data]
        key = repr((code.co_code, code.co_names, code.co_consts, choices, arrays, way))
        key = (key, function.__qualname__, repr(args))
        if key not in done:
            backend = importlib.import_module("keras").backend.backend()
            here = trace.Way(backend=backend, num_devices=way.num_devices, precision=way.precision)
            importlib.import_module("keras").utils.clear_session()  # as in a new process
            done[key] = trace._launch(job, here, function, *args)
        return done[key]

    for name in ("kerasdp.parity.trace", "kerasdp.parity.bisect"):
        importlib.import_module(name)
        sys.modules[name].call_in = call_in


@contextlib.contextmanager
def as_in_a_new_process(name):
    """Works in a folder of its own; puts back folder, environment and flags."""
    folder, environment, known = os.getcwd(), dict(os.environ), set(flags.FLAGS)
    os.makedirs(name)
    os.chdir(name)
    sys.argv[:] = ["example.py"]
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for flag in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, flag)
        flags.FLAGS.unparse_flags()


def error_of(name, code):
    """Runs an example; returns the line that fails, its error, and what the example has printed; None if it runs."""
    told = io.StringIO()
    with as_in_a_new_process(name), contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        with open("example.py", "w") as file:
            file.write(code)
        try:
            runpy.run_path("example.py", run_name="__main__")
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not error.code:
                return None
            lines = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.endswith("example.py")]
            place = f"line {lines[-1].lineno}, `{lines[-1].line}`: " if lines else ""
            return f"{place}{type(error).__name__}: {error}\n{told.getvalue()}"
    return None


def main():
    with open(sys.argv[1]) as file:
        examples = json.load(file)
    app.define_help_flags()  # which stay
    if "--processes" not in sys.argv:
        in_this_process()
    # First, so that JAX, which makes its devices once, has as many as any example asks for.
    kerasdp.launch(lambda runner: None, num_devices=2, device="cpu", verbose=0)
    errors, seconds = {}, {}
    for name, code in examples.items():
        start = time.perf_counter()
        if (error := error_of(name, code)) is not None:
            errors[name] = error
        seconds[name] = round(time.perf_counter() - start, 2)
    print("RESULT " + json.dumps({"errors": errors, "seconds": seconds}))


main()
