"""Trains the models of this folder in several ways and writes a line of JSON for each training.

    python -m tests.real_code.run --out=runs/real_code                        # all models, six ways
    python -m tests.real_code.run --out=runs/real_code --only=Swin,XLNet      # some of them again
    python -m tests.real_code.run --out=runs/real_code --precision=float64 --ways=torch:1,torch:2
    python -m tests.real_code.run --out=runs/strangers --gallery=strangers    # those of tests/strangers, twelve ways

torch:keras is Keras' own `fit` on one device; torch:2:off trains with check="off" what torch:2 refused.
A way is a process that trains all models, one after another. What it has done it does not do again, except for the
names in `--only`: if it dies, or a model takes longer than `--limit` seconds, the next process continues behind it.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

WAYS = ("torch:1", "jax:1", "tensorflow:1", "torch:2", "jax:2", "tensorflow:2")
KERAS_WAYS = ("torch:keras", "jax:keras", "tensorflow:keras")
UNCHECKED_WAYS = ("torch:2:off", "jax:2:off", "tensorflow:2:off")
WAYS_OF = {"real_code": WAYS, "strangers": (*WAYS, *KERAS_WAYS, *UNCHECKED_WAYS)}
OPTIMIZERS = ("sgd", "adam")
OPTIMIZERS_OF = {"real_code": OPTIMIZERS, "strangers": ("sgd",)}
ROOT = pathlib.Path(__file__).resolve().parents[2]


def results_file(out: pathlib.Path, way: str, precision: str) -> pathlib.Path:
    return out / f"{way.replace(':', '-')}-{precision}.jsonl"


def read_results(path: pathlib.Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last line of each model and optimizer."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["model"], line["optimizer"]): line for line in lines}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the results")
    parser.add_argument("--only", default="", help="models to train again, separated by commas")
    parser.add_argument("--models", default="", help="models to train, if they were not trained yet; all, if not given")
    parser.add_argument("--gallery", choices=WAYS_OF, default="real_code", help="the folder of the models")
    parser.add_argument("--ways", default="", help="all of the gallery, if not given")
    parser.add_argument("--optimizers", default="", help="all of the gallery, if not given")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one training")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--trainings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.ways = options.ways or ",".join(WAYS_OF[options.gallery])
    options.optimizers = options.optimizers or ",".join(OPTIMIZERS_OF[options.gallery])
    return options


def main() -> None:
    options = arguments()
    if options.worker:
        run_worker(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(functools.partial(run_way, options), options.ways.split(",")))


def run_way(options: argparse.Namespace, way: str) -> None:
    """Starts processes of one way until each training has its line."""
    path = results_file(options.out, way, options.precision)
    wanted = [name for name in (options.only or options.models).split(",") if name] or names_of_cases(options.gallery)
    known = {} if options.only else read_results(path)
    if way in UNCHECKED_WAYS:
        checked = read_results(results_file(options.out, way.removesuffix(":off"), options.precision))
        wanted = [name for name in wanted if any("refused" in checked.get((name, each), {}) for each in OPTIMIZERS)]
    left = [[name, optimizer] for name in wanted for optimizer in options.optimizers.split(",")]
    left = [pair for pair in left if tuple(pair) not in known]
    while left:
        before = path.stat().st_size if path.exists() else 0
        ending = supervise_worker(options, way, left, path)
        with open(path, "a+") as file:
            file.seek(before)
            done = [[line["model"], line["optimizer"]] for line in map(json.loads, file)]
        if not done or (ending and left[: len(done)] == done and len(done) < len(left)):
            name, optimizer = left[len(done)]
            line = {"model": name, "optimizer": optimizer, "error": ending or "the process ended without a word"}
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
            done.append([name, optimizer])
            print(way, name, optimizer, line["error"], flush=True)
        left = left[len(done) :]


def supervise_worker(options: argparse.Namespace, way: str, left: list[list[str]], path: pathlib.Path) -> str:
    """Runs one process; returns why it was ended or died, and nothing if it ended by itself."""
    command = [sys.executable, "-m", "tests.real_code.run", "--worker", way, "--trainings", json.dumps(left)]
    command += ["--out", str(options.out), "--precision", options.precision, "--gallery", options.gallery]
    path_of_modules = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path_of_modules, "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    log, started = path.with_suffix(".log"), time.time()
    with open(log, "a") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.time() - max(started, path.stat().st_mtime if path.exists() else 0) > options.limit:
                    return f"nothing happened for {options.limit:.0f} seconds"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"the process died with code {process.returncode}" if process.returncode else ""


def names_of_cases(gallery: str) -> list[str]:
    from tests.real_code.cases import load_cases

    return list(load_cases(gallery))


def run_worker(options: argparse.Namespace) -> None:
    """Trains what is left in one way. On an error it ends: with several ranks nobody knows where the others are."""
    import kerasdp

    backend, count, *off = options.worker.split(":")
    path = results_file(options.out, options.worker, options.precision)
    initial = options.out / f"initial-{backend}" if options.gallery == "strangers" else None
    trainings = json.loads(options.trainings)
    train = functools.partial(
        train_all, trainings=trainings, path=str(path), gallery=options.gallery, initial=initial and str(initial)
    )
    if count == "keras":
        os.environ["KERAS_BACKEND"] = backend
        train(None)
        return
    kerasdp.launch(
        train,
        backend=backend,
        num_devices=int(count),
        device="cpu",
        precision=options.precision,
        check="off" if off else "first",
        verbose=0,
    )


def train_all(runner: Any, trainings: list[list[str]], path: str, gallery: str, initial: str | None) -> None:
    from tests.real_code.cases import load_cases
    from tests.real_code.train import train_one

    cases = load_cases(gallery)
    if initial:
        os.makedirs(initial, exist_ok=True)
    for name, optimizer in trainings:
        line = train_one(runner, cases[name], optimizer, pathlib.Path(initial, f"{name}.npz") if initial else None)
        if runner is None or runner.is_chief:
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, optimizer, line.get("error") or line.get("refused") or line["losses"][-1:], flush=True)
        # Of weights that differ at the end all ranks know.
        is_fatal = "error" in line and not line["error"].startswith("ReplicasDifferError")
        if is_fatal and runner and runner.strategy.processes.num_processes > 1:
            return


if __name__ == "__main__":
    main()
