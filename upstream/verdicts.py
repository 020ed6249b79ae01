"""Runs the programs of this folder, and says of which the defect is still there.

    python upstream/verdicts.py                                     # with the versions that are installed
    python upstream/verdicts.py --backends=torch embedding_in_bfloat16

Each program is plain Keras, of at most 20 lines; its first line says what should hold, a comment on which backends it
runs. It ends with exit code 0 where that holds, with an assertion or another error where it does not. Prints a table in
Markdown: "holds", or what the program printed last.
"""

import argparse
import concurrent.futures
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys

from packaging.version import Version

FOLDER = pathlib.Path(__file__).parent
BACKENDS = ("torch", "jax", "tensorflow")
SECONDS = 300


def programs(names: list[str]) -> list[pathlib.Path]:
    """Returns the programs of these names; of none: all."""
    found = sorted(path for path in FOLDER.glob("*.py") if path.name != pathlib.Path(__file__).name)
    return [path for path in found if not names or path.stem in names]


@functools.cache
def keras_version() -> str:
    """Returns the version of Keras that is imported, whichever of its packages it is of."""
    code = "import keras; print(keras.__version__)"
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout.split()[-1]


def verdict(path: pathlib.Path, backend: str) -> str:
    """Runs a program on a backend."""
    text = path.read_text()
    match, least = (re.search(rf"^# {what} (.*)$", text, re.M) for what in ("backends:", "needs: keras"))
    if match is None or backend not in match[1].split(", "):
        return ""
    if least is not None and Version(keras_version()) < Version(f"{least[1]}.dev0"):
        return ""
    env = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, str(path)], env=env, **pipes) as program:
        try:
            out, errors = program.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            return f"**no**: it has not ended after {SECONDS} s"
    if program.returncode == 0:
        return "holds"
    found = re.findall(r"^(?:\w+\.)*\w*Error\b.*", errors, re.M)
    error = found[-1] if found else "it failed"
    said = (out.strip().splitlines() or [""])[-1]
    return f"**no**: {said if error.startswith('AssertionError') else error}"[:120].replace("|", "/")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of programs, without .py")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="a list")
    args = parser.parse_args()
    backends = args.backends.split(",")
    print("| what should hold | " + " | ".join(backends) + " |\n|---|" + "---|" * len(backends))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = [(path, [pool.submit(verdict, path, backend) for backend in backends]) for path in programs(args.names)]
        for path, verdicts in rows:
            title = path.read_text().partition('"""')[2].partition('"""')[0].rstrip(".")
            cells = " | ".join(one.result() for one in verdicts)
            print(f"| {title} (`{path.stem}`) | {cells} |", flush=True)


if __name__ == "__main__":
    main()
