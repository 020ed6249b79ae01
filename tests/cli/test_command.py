"""The command `kerasdp`: its sub-commands, what it copies, and how it answers wrong use."""

import concurrent.futures
import importlib.metadata
import json
import subprocess
import sys
import zipfile

import pytest

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
    for words in (["--help"], ["copy", "--help"], ["env", "-h"]):
        assert call(*words) == 0
        assert capsys.readouterr().out == text
    assert {line.split()[0] for line in text.splitlines() if line.startswith("  ")} >= RECIPES
    assert call("--version") == 0 and capsys.readouterr().out == f"kerasdp {importlib.metadata.version('kerasdp')}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "there is no sub-command 'trian'; did you mean kerasdp train?"),
        (["--gpus=2"], "there is no sub-command '--gpus=2'; kerasdp list shows all"),
        (["copy"], "expected kerasdp copy NAME [DESTINATION] [--force]. Received: ''; kerasdp list shows the names"),
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
    monkeypatch.chdir(tmp_path)
    assert call("copy", "train") == 0
    assert capsys.readouterr().out == "copied to train.py\n"
    (tmp_path / "train.py").write_text("mine")
    assert call("copy", "recipes/train.py") == 2
    assert "there is already train.py" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == "mine"
    assert call("copy", "train", "--force") == 0
    assert (tmp_path / "train.py").read_bytes() == (ROOT / "recipes" / "train.py").read_bytes()
    assert call("copy", "train", "new/mine.py") == 0 and (tmp_path / "new" / "mine.py").exists()
    assert call("copy", "smoke", "train.py") == 2 and "is a file" in capsys.readouterr().err
    assert call("copy", "cluster", "jobs") == 0
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == {path.name for path in (ROOT / "cluster").iterdir()}


def test_copies_are_not_written_through_links(tmp_path, capsys, monkeypatch):
    """Neither to what is there, nor to what a link would make; with --force the link itself is replaced."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.py").write_text("of somebody")
    for target in ("secret.py", "not-there.py"):
        (tmp_path / "train.py").symlink_to(target)
        assert call("copy", "train") == 2
        assert "there is already train.py" in capsys.readouterr().err
        assert call("copy", "train", "--force") == 0
        assert not (tmp_path / "train.py").is_symlink()
        (tmp_path / "train.py").unlink()
    assert (tmp_path / "secret.py").read_text() == "of somebody" and not (tmp_path / "not-there.py").exists()
    (tmp_path / "jobs").symlink_to("nowhere")
    assert call("copy", "cluster", "jobs", "--force") == 2 and "a link to nothing" in capsys.readouterr().err


def test_copies_bring_what_they_import(tmp_path):
    command.copy("finetune", str(tmp_path), force=False)
    assert {path.name for path in tmp_path.iterdir()} == {"finetune.py", "text.py"}


@pytest.mark.proof
def test_a_recipe_runs_by_its_name(tmp_path):
    """Elsewhere, with a flagfile by its name; the exit code, and the files, are those of the recipe."""
    flags = ["--flagfile=smoke", f"--backend={BACKENDS[0]}", "--device=cpu", "--max_steps=1", f"--workdir={tmp_path}/r"]
    done = run("-m", "kerasdp", "train", *flags, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r" / "report.json").read_text())["steps"] == 1
    refused = run("-m", "kerasdp", "parity", "--nosuch", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert refused.returncode == 2 and refused.stderr.startswith("error: there is no flag --nosuch")
    told = run("-m", "kerasdp", "train", "--help", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert told.stdout.startswith("usage: kerasdp train [--flagfile"), told.stdout[:100]


@pytest.mark.proof
def test_nobody_reads_the_output(tmp_path):
    """As with `train | head -1`: the training goes on, and says so once; help ends without a word."""
    flags = [
        f"--backend={BACKENDS[0]}",
        "--device=cpu",
        "--dataset=synthetic",
        "--max_steps=3",
        f"--workdir={tmp_path}/r",
    ]
    for arguments, last in ((flags, "has ended; training continues\n"), (["--help"], "")):
        program = ROOT / "recipes" / "train.py"
        with start(program, *arguments, backend=None, cwd=tmp_path, PYTHONPATH=str(ROOT)) as done:
            assert done.stdout.readline()
            done.stdout.close()
            said = done.stderr.read()
        assert done.returncode == 0 and said.endswith(last) and said.count("\n") == bool(last), said
    assert json.loads((tmp_path / "r" / "report.json").read_text())["steps"] == 3


def test_env_names_what_is_wrong(monkeypatch, capsys):
    """A backend that cannot be imported, and a driver with GPUs that nobody sees."""
    asked = []

    def answer(name):
        asked.append(name)
        return (
            {"error": "ImportError: libcudart"}
            if name == BACKENDS[0]
            else {"version": "1", "devices": [], "unseen": f"{name} sees none: why"}
        )

    monkeypatch.setattr(command, "_backend_facts", answer)
    assert call("env") == 1
    text = capsys.readouterr().out
    assert asked == BACKENDS
    assert f"wrong: {BACKENDS[0]} cannot be imported (ImportError: libcudart): pip install --force-reinstall" in text
    for name in BACKENDS[1:]:
        assert f"wrong: {name} sees none: why" in text


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_env_asks_the_frameworks(backend):
    found = command._backend_facts(backend)
    assert found["version"].split("+")[0] == importlib.metadata.version(backend).split("+")[0]
    assert found["devices"] == [] or hardware.num_gpus("cuda")


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
    "custom_model": [],
    "from_scratch": ["--dataset=digits", "--batch_size=64", "--device=cpu", "--epochs=1"],
    "text": ["--device=cpu", "--max_steps=2"],
    "sweep": ["--trials=2", "--model=mlp", "--device=cpu", "--max_steps=2"],
    "make_shards": ["shards"],
    "sharded": ["--data_dir=../by-name-make_shards/shards", "--device=cpu", "--max_steps=2"],
    "transfer": [
        "--data_dir=../photos",
        "--weights=none",
        "--size=32,32",
        "--head_epochs=1",
        "--epochs=1",
        "--device=cpu",
    ],
    "finetune": ["--lora_rank=2", "--device=cpu", "--max_steps=2", "--epochs=1"],
    "parity": ["--device_counts=1", "--max_steps=2", "--device=cpu"],
    "bisection": ["--model=mlp", "--max_steps=1", "--device=cpu"],
    "pipeline": ["--model=mlp", "--split_sizes=32", "--repetitions=2", "--device=cpu"],
    "gan": ["--batch_size=16", "--device=cpu", "--max_steps=2"],
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
                assert done.returncode == 0, (name, done.stdout, done.stderr)
