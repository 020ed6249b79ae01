"""The command `kerasdp`: its sub-commands, what it copies, and how it answers wrong use."""

import concurrent.futures
import importlib.metadata
import json
import subprocess
import sys
import tomllib
import types
import zipfile

import pytest

import kerasdp
from kerasdp.cli import command
from kerasdp.processes import hardware
from tests.helpers import BACKENDS, ROOT, make_images, run, start

RECIPES = {path.stem for path in (ROOT / "recipes").glob("*.py")}


def call(*words):
    """Runs the command in this process; returns its exit code."""
    try:
        command.main(words)
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_help_names_all_sub_commands(capsys):
    assert call() == 0
    text = capsys.readouterr().out
    assert call("--help") == 0 and capsys.readouterr().out == text
    assert call("--version") == 0 and capsys.readouterr().out == f"kerasdp {importlib.metadata.version('kerasdp')}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "there is no sub-command 'trian'; did you mean kerasdp train?"),
        (["--gpus=2"], "there is no sub-command '--gpus=2'; kerasdp list shows all sub-commands"),
        (["copy"], "expected kerasdp copy NAME [FOLDER]. Received: ''"),
        (["copy", "train", "--force"], "expected kerasdp copy NAME [FOLDER]. Received: 'train --force'"),
        (["copy", "nosuch"], "Received: 'nosuch'"),
    ],
)
def test_wrong_use_is_one_line(words, line, capsys):
    assert call(*words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and line in said


def test_list_has_a_line_for_each(capsys):
    assert call("list") == 0
    lines = capsys.readouterr().out.splitlines()
    found = [path for folder in command.FOLDERS for path in command.files(folder)]
    for path in found:
        (line,) = [line for line in lines if line.startswith(f"  {command.name_of(path)} ")]
        summary = command.summary_of(path)
        assert line.split(maxsplit=1)[1].strip() == summary and len(summary) > 20, line
        assert not summary.startswith("python "), "a command, where a sentence should be"
    assert set(found) == {path for folder in command.FOLDERS for path in (ROOT / folder).iterdir() if path.is_file()}


def test_copies_never_overwrite(tmp_path, capsys, monkeypatch):
    """Neither a file, nor what a link leads to."""
    monkeypatch.chdir(tmp_path)
    assert call("copy", "train") == 0
    assert capsys.readouterr().out == "copied to train.py\n"
    assert (tmp_path / "train.py").read_bytes() == (ROOT / "recipes" / "train.py").read_bytes()
    (tmp_path / "train.py").write_text("mine")
    (tmp_path / "predict.py").symlink_to("not-there.py")
    for name in ("train", "predict"):
        assert call("copy", f"recipes/{name}.py") == 2
        assert f"these files exist already: {name}.py" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == "mine" and not (tmp_path / "not-there.py").exists()
    for place in ("train.py", "predict.py"):
        assert call("copy", "smoke", place) == 2 and "which is not a folder" in capsys.readouterr().err
    assert call("copy", "cluster", "jobs") == 0
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == {path.name for path in (ROOT / "cluster").iterdir()}


def test_copies_bring_what_they_import(tmp_path):
    command.copy("sweep", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.py", "train.py"}


@pytest.mark.proof
def test_a_new_folder_is_a_project(tmp_path):
    """Its test trains the recipe on one and on two devices; its package is this version's."""
    folder = tmp_path / "mine"
    command.copy("train", str(folder))
    assert {path.name for path in folder.iterdir()} == {"train.py", "pyproject.toml", "test_two_steps.py"}
    needed = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["dependencies"]
    assert needed == [f"kerasdp[all]=={kerasdp.__version__}"]
    done = run("-m", "pytest", "-p", "no:cacheprovider", cwd=folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    (folder / "train.py").write_text((folder / "train.py").read_text().replace("runner.config", "None"))
    assert run("-m", "pytest", "-p", "no:cacheprovider", cwd=folder, PYTHONPATH=str(ROOT)).returncode == 1


@pytest.mark.proof
def test_a_recipe_runs_by_its_name(tmp_path):
    """Elsewhere, with a flagfile by its name; the exit code, and the files, are those of the recipe."""
    flags = ["--flagfile=smoke", f"--backend={BACKENDS[0]}", "--device=cpu", "--max_steps=1", f"--workdir={tmp_path}/r"]
    done = run("-m", "kerasdp", "train", *flags, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r" / "report.json").read_text())["steps"] == 1
    refused = run("-m", "kerasdp", "parity", "--nosuch", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert refused.returncode == 1 and "Unknown command line flag 'nosuch'" in refused.stderr


@pytest.mark.proof
def test_nobody_reads_the_output(tmp_path):
    """As with `train | head -1`: the training goes on, and says so once."""
    flags = [
        f"--backend={BACKENDS[0]}",
        "--device=cpu",
        "--dataset=synthetic",
        "--max_steps=3",
        f"--workdir={tmp_path}/r",
    ]
    program = ROOT / "recipes" / "train.py"
    with start(program, *flags, backend=None, cwd=tmp_path, PYTHONPATH=str(ROOT)) as done:
        assert done.stdout.readline()
        done.stdout.close()
        said = done.stderr.read()
    assert done.returncode == 0 and said.endswith("has ended; training continues\n") and said.count("\n") == 1, said
    assert json.loads((tmp_path / "r" / "report.json").read_text())["steps"] == 3


# A backend that cannot be imported, one whose process dies, and one that sees devices.
PROGRAMS = {"torch": "raise ImportError('libcudart')", "jax": "import os; os._exit(3)", "tensorflow": "print('2 GPUs')"}


def test_env_names_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(command, "_DEVICES", types.SimpleNamespace(format=lambda name: PROGRAMS[name]))
    monkeypatch.setattr(command, "is_installed", lambda name: True)
    assert call("env") == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "torch: ImportError: libcudart", "jax: its process has ended without a message", "tensorflow: 2 GPUs",
    ]  # fmt: skip


@pytest.mark.proof
def test_env_asks_the_frameworks(capsys):
    assert call("env") == 0
    text = capsys.readouterr().out
    assert all(f"{name} {importlib.metadata.version(name)}" in text for name in ("keras", *BACKENDS))
    lines = {line.partition(": ")[0]: line.partition(": ")[2] for line in text.splitlines()}
    for name in BACKENDS:
        assert lines[name] == "1 virtual CPU device (no GPU found)" or hardware.num_gpus()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    done = run("-m", "build", "--outdir", folder, ROOT)  # the sdist, and from it the wheel
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.proof
def test_the_wheel_holds_everything(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    found = [path for folder in command.FOLDERS for path in command.files(folder)]
    assert {f"kerasdp/kit/{path.relative_to(ROOT)}" for path in found} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "kerasdp").rglob("*.py")} <= names
    assert {"kerasdp/py.typed", "kerasdp/data/digits.npz", "kerasdp/data/digits.txt"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "runs/")) or "__pycache__" in name]


# What each recipe needs to be short, in an order in which each finds what it reads; its folder is beside the others'.
SHORT = {
    "train": ["--flagfile=smoke", "--device=cpu", "--max_steps=3", "--workdir=run"],
    "evaluate": ["--checkpoint=../by-name-train/run", "--device=cpu"],
    "predict": ["--checkpoint=../by-name-train/run", "--device=cpu", "--output=digits.csv"],
    "export": ["--checkpoint=../by-name-train/run", "--to=digits.keras"],
    "from_scratch": ["--dataset=digits", "--batch_size=64", "--device=cpu", "--epochs=1"],
    "text": ["--device=cpu", "--max_steps=2"],
    "tabular": ["--device=cpu", "--max_steps=2"],
    "sweep": ["--trials=2", "--model=mlp", "--device=cpu", "--max_steps=2"],
    "make_shards": ["shards"],
    "sharded": ["--data_dir=../by-name-make_shards/shards", "--device=cpu", "--max_steps=2"],
    "transfer": [
        "--data_dir=../photos",
        "--weights=none",
        "--dataset=images(size=(32,32))",
        "--head_epochs=1",
        "--epochs=1",
        "--device=cpu",
    ],
    "finetune": ["--lora_rank=2", "--device=cpu", "--max_steps=2", "--epochs=1"],
    "parity": ["--device_counts=1", "--max_steps=2", "--device=cpu"],
    "bisection": ["--model=mlp", "--max_steps=1", "--device=cpu"],
    "pipeline": ["--model=mlp", "--split_sizes=32", "--repetitions=2", "--device=cpu"],
    "custom_loop": ["--batch_size=16", "--device=cpu", "--max_steps=2"],
    "diffusion": ["--batch_size=16", "--device=cpu", "--max_steps=2"],
    "cartpole": ["--device=cpu", "--max_steps=2"],
    "ray_train": ["--help"],  # Ray is not installed here; tests/hosts/test_ray.py runs it
}


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_recipes_of_an_installed_wheel(wheel, tmp_path):
    """In an environment of its own, which finds the other packages here; by their names, and from copies."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    programs = tmp_path / "env" / "bin"

    def shell(*words, folder):
        folder.mkdir(exist_ok=True)
        env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run(words, cwd=folder, env=env, text=True, capture_output=True, timeout=600)

    installed = shell("python", "-m", "pip", "install", "-q", "--no-deps", str(wheel), folder=tmp_path / "empty")
    assert installed.returncode == 0, installed.stderr
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    mine = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(mine))  # behind its own

    listed = shell("kerasdp", "list", folder=tmp_path / "empty")
    assert listed.returncode == 0 and all(name in listed.stdout for name in RECIPES), listed.stderr
    make_images(tmp_path / "photos", {"cats": 10, "dogs": 10}, size=(40, 40))
    assert set(SHORT) == set(RECIPES)

    def by_name(name):
        return shell("kerasdp", name, *SHORT[name], folder=tmp_path / f"by-name-{name}")

    def from_a_copy(name):
        folder = tmp_path / f"copy-{name}"
        assert shell("kerasdp", "copy", name, folder=folder).returncode == 0
        flags = [flag.replace("=smoke", f"={ROOT}/flags/smoke.flags") for flag in SHORT[name]]
        return shell("python", f"{name}.py", *flags, folder=folder)

    for name in SHORT:
        with concurrent.futures.ThreadPoolExecutor() as both:
            for ended in [both.submit(way, name) for way in (by_name, from_a_copy)]:
                done = ended.result()
                expected = 1 if "--help" in SHORT[name] else 0  # as absl ends
                assert done.returncode == expected, (name, done.stdout, done.stderr)
