"""Recipes and flagfiles, run as their users run them."""

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import BACKENDS, ROOT, environment, losses_in, make_images, run, steps_in

FLAGFILES = sorted(file for file in (ROOT / "flags").glob("*.flags") if not file.stem.startswith("pipeline"))


def train(*flags, **settings):
    """With its backend there already; the README's commands start as users' do."""
    backend = next((flag.partition("=")[2] for flag in flags if str(flag).startswith("--backend=")), None)
    return run("recipes/train.py", *flags, backend=backend if backend in BACKENDS else None, **settings)


def said(done):
    """Returns the lines of stderr without messages of TensorFlow's native code, which only tests print."""
    return [line for line in done.stderr.splitlines() if not re.match(r"[EIW]0000 |WARNING: All log messages", line)]


def assert_one_line_and_exit_code_2(done, words):
    assert done.returncode == 2, done.stderr
    (line,) = said(done)
    assert re.search(words, line), line


def some_of(cases, chosen):
    """All cases as parameters; those that are not chosen are a part of the slow proofs."""
    return [pytest.param(*case, marks=[] if case in chosen else pytest.mark.proof) for case in cases]


NINE = [(name, count) for name in BACKENDS for count in (1, 2, 4)]


# Backend, number of devices, epochs, accuracy.
SHORT_RUNS = [(name, 2, 4, 0.8) for name in ("jax", "tensorflow") if name in BACKENDS] or [(BACKENDS[0], 2, 4, 0.8)]


@pytest.mark.parametrize(
    ("backend", "count", "epochs", "least"),
    some_of([*SHORT_RUNS, *((*way, 20, 0.96) for way in NINE)], SHORT_RUNS),
)
def test_the_default_command_learns(backend, count, epochs, least, tmp_path):
    """The nine runs: accuracy on held-out digits, the lines that people see, the files that a run leaves."""
    shorter = [] if epochs == 20 else [f"--epochs={epochs}"]
    done = train(f"--backend={backend}", f"--gpus={count}", "--device=cpu", *shorter, f"--workdir={tmp_path}")
    assert done.returncode == 0 and said(done) == [], done.stderr
    lines = done.stdout.strip().splitlines()
    share = "" if count == 1 else f" ({64 // count} a replica)"
    devices = f"{count} virtual CPU device{'s' if count > 1 else ''} (as asked)"
    assert lines[0] == f"{backend} on {devices} | lenet | batch 64{share} | learning rate 0.03 | float32"
    assert [line.partition(" ")[0] for line in lines[1:-1]] == ["epoch"] * epochs  # once, however many processes
    accuracy = float(
        re.fullmatch(r"validation accuracy (\S+), \S+ s/epoch, \S+ samples/s on .*; files in .*", lines[-1])[1]
    )
    assert accuracy >= least
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["final"]["val_accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert (report["num_devices"], report["steps"], report["epochs"]) == (count, 23 * epochs, epochs)
    assert report["num_processes"] == (count if backend == "torch" else 1)
    assert report["peak_memory_bytes"] > 1e8
    with open(tmp_path / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == epochs
    assert float(rows[-1]["val_accuracy"]) == report["final"]["val_accuracy"]
    assert [step["step"] for step in steps_in(tmp_path)] == list(range(10, 23 * epochs + 1, 10))
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock", "config.json", "steps.jsonl", "history.csv", "report.json", "curves.png", "checkpoints", "model.keras",
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[1:] == [
        f"step-{23 * epoch:08d}.safetensors" for epoch in range(epochs - 2, epochs + 1)
    ]


@pytest.mark.proof
def test_the_losses_of_the_default_command_are_one_curve(tmp_path):
    """In float32, over all 460 steps. With ReLU in place of tanh they are 40% apart within 100."""
    losses = {}
    for backend, count in NINE:
        place = tmp_path / f"{backend}{count}"
        done = train(f"--backend={backend}", f"--gpus={count}", "--device=cpu", "--log_every=1", f"--workdir={place}")
        assert done.returncode == 0, done.stderr
        losses[backend, count] = np.array(losses_in(place))
    first = losses[NINE[0]]
    apart = {way: np.max(np.abs(each - first) / first) for way, each in losses.items()}
    print({" x ".join(map(str, way)): f"{most:.1e}" for way, most in apart.items()})
    assert len(first) == 460 and max(apart.values()) < 1e-4


@pytest.mark.short("lenet_fashion_2gpus")
@pytest.mark.parametrize("file", FLAGFILES, ids=lambda file: file.stem)
def test_flagfiles_run(file, tmp_path):
    """Each named run, shortened, on random images; the backends take turns."""
    # The deep one where nothing is compiled, with few samples.
    is_deep = "resnet" in file.stem
    name = BACKENDS[0 if is_deep else FLAGFILES.index(file) % len(BACKENDS)]
    flags = [f"--backend={name}", "--device=cpu", "--max_steps=2", f"--workdir={tmp_path}"]
    flags += ["--batch_size=8"] if is_deep else []
    if "mnist" in file.read_text():
        flags.append("--dataset=synthetic(num_samples=1100)")
    done = train(f"--flagfile={file.relative_to(ROOT)}", *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == 2


@pytest.mark.proof  # quick counterpart: tests/cli runs each recipe, in CI from a wheel
def test_parity(tmp_path):
    """The recipe: a table, a picture, what differs, and an exit code that says whether all trained alike."""
    names = BACKENDS[-2:]
    (tmp_path / "odd.py").write_text(
        "def build(input_shape, num_classes):\n"
        "    import keras\n"
        "    from keras import layers\n"
        f"    rate = 0.5 if keras.backend.backend() == {names[-1]!r} else 1.0\n"
        "    scale = layers.Rescaling(rate / 255, name='scale')\n"
        "    return keras.Sequential([keras.Input(input_shape), scale, layers.Flatten(), layers.Dense(num_classes)])\n"
    )
    flags = (f"--backends={','.join(names)}", "--device_counts=1", f"--model={tmp_path}/odd.py:build", "--max_steps=2")
    done = run("recipes/parity.py", *flags, f"--workdir={tmp_path}")
    assert done.returncode == (1 if len(names) > 1 else 0), done.stdout + done.stderr
    table = done.stdout[done.stdout.index("trained on") :].splitlines()
    assert [row.split()[:3] for row in table[1 : len(names) + 1]] == [[name, "x", "1"] for name in names]
    assert len(names) == 1 or "the output of scale differs first" in done.stdout
    assert (tmp_path / "parity.png").stat().st_size > 10_000
    refused = run("recipes/parity.py", "--gpus=2", backend=BACKENDS[0])
    assert refused.returncode == 1 and "Unknown command line flag 'gpus'" in refused.stderr


@pytest.mark.proof  # in short: data/test_datasets.py
def test_a_folder_of_images(backend, tmp_path):
    make_images(tmp_path / "images", {"cat": 20, "dog": 13})
    done = train(
        f"--backend={backend}", "--gpus=2", "--device=cpu", "--model=mlp", "--dataset=images(size=(8,8))",
        f"--data_dir={tmp_path}/images", "--batch_size=7", "--epochs=2", f"--workdir={tmp_path}/run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_wrong_choices_before_any_framework_starts(tmp_path):
    for flag, words in [
        ("--backend=theano", "expected one of torch, jax, tensorflow"),
        (f"--workdir={ROOT / 'README.md'}/below", "--workdir: cannot use"),
    ]:
        assert_one_line_and_exit_code_2(train(f"--workdir={tmp_path}", flag), words)


@pytest.mark.parametrize("backend", some_of([(name,) for name in BACKENDS], [(BACKENDS[0],)]))
def test_wrong_choices_in_a_worker(backend, tmp_path):
    """Found in two processes with torch: still one line."""
    workdir = f"--workdir={tmp_path}/runs/mine"
    done = train(f"--backend={backend}", "--gpus=2", "--device=cpu", "--optimizer=sgdd", workdir)
    assert_one_line_and_exit_code_2(done, "--optimizer: expected one of .* Received: 'sgdd'")


@pytest.mark.proof  # quick counterpart: tests/cli runs each recipe, in CI from a wheel
def test_pipeline_recipe(tmp_path):
    """The toy model in all ways: a line each, two pictures, the figures in JSON."""
    flags = ["--model=toy", "--dataset=synthetic(shape=(10,), num_classes=5, num_samples=16)"]
    flags += ["--batch_size=8", "--split_sizes=3,100", "--repetitions=2", "--device=cpu", f"--workdir={tmp_path}"]
    done = run("recipes/pipeline.py", *flags)
    assert done.returncode == 0, done.stderr
    names = ["single device", "layer split", "pipelined, split size 3"]  # 100 is above the batch
    for way in names:
        assert re.search(rf"^{way} +\S+ s \+- \S+", done.stdout, re.M)
    found = json.loads((tmp_path / "pipeline.json").read_text())
    assert [(way, len(result["seconds"])) for way, result in found.items()] == [(way, 2) for way in names]
    for picture in ("bars.png", "sweep.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


@pytest.mark.proof  # its parts: tests/benchmark
def test_comparison_of_speeds(tmp_path):
    """The kit and its peers on one backend: a table, ratios, the figures in JSON, pictures."""
    name = BACKENDS[len(BACKENDS) // 2]
    flags = [f"--backends={name}", f"--peers={name},keras", "--batch_size=8", "--steps_per_round=2", "--rounds=2"]
    done = run("benchmarks/compare.py", *flags, "--device=cpu", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    names = [f"kerasdp-{name}", name, f"keras-{name}"]
    for one in names:
        assert re.search(rf"^{one} +[\d,.]+ +[\d,.]+ \.\. [\d,.]+ +\S+ s +[\d,]+ +\S+ s$", done.stdout, re.M)
    for one in names[1:]:
        assert re.search(rf"^{names[0]} / {one} +\d+\.\d\d +\(\d", done.stdout, re.M)
    found = json.loads((tmp_path / "benchmark.json").read_text())
    assert [one["name"] for one in found["contenders"]] == names
    assert all(len(one["seconds"]) == 2 and not one["error"] for one in found["contenders"])
    assert len({one["ready"]["parameters"] for one in found["contenders"]}) == 1
    assert (tmp_path / "bars.png").stat().st_size > 10_000
    assert_one_line_and_exit_code_2(run("benchmarks/compare.py", "--peers=theano"), "--peers: expected some of")


@pytest.mark.proof  # in short: test_loop_recipes.py
def test_a_table(backend, tmp_path):
    """The recipe reaches what its docstring says; of a CSV file it takes numbers and categories."""
    done = run("recipes/tabular.py", f"--backend={backend}", "--device=cpu", f"--workdir={tmp_path}/made")
    assert done.returncode == 0, done.stderr
    final = json.loads((tmp_path / "made" / "report.json").read_text())["final"]
    assert final["val_root_mean_squared_error"] == pytest.approx(1.1, abs=0.05)
    rows = [f"{number},{'ab'[number % 2]},{number % 2 * 3 + number / 100}" for number in range(200)]
    (tmp_path / "table.csv").write_text("\n".join(["size,kind,price", *rows]))
    flags = (f"--csv={tmp_path}/table.csv", "--target=price", "--epochs=2", f"--workdir={tmp_path}/csv")
    done = run("recipes/tabular.py", f"--backend={backend}", "--device=cpu", *flags)
    assert done.returncode == 0, done.stderr
    wrong = run("recipes/tabular.py", f"--backend={backend}", "--device=cpu", *flags[:1])
    assert_one_line_and_exit_code_2(wrong, "--target: expected one of size, kind, price. Received: 'y'")


def test_ruff():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_the_project_speaks_of_itself_alone():
    """No path of a machine in what is shipped."""
    for pattern in ("*.md", "docs/**/*.md", "kerasdp/**/*.py", "recipes/*.py", "flags/*.flags"):
        for path in ROOT.glob(pattern):
            assert not re.search(r"/(home|root|work|tmp)/", path.read_text()), path
