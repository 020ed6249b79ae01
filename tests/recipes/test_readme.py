"""The commands and the code of the README, and of the pages that they moved to, run as their users run them."""

import importlib.util
import re
import shlex
import sys

import pytest

from tests.helpers import BACKENDS, ROOT, run

README = (ROOT / "README.md").read_text()
# What the README held once, and its commands and code are run as well.
README += "".join(
    (ROOT / "docs" / f"{page}.md").read_text()
    for page in ("quickstart", "reproducibility", "checkpoints", "large-models")
)
BASH = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines() if line.strip()]
# Without those that need a server, or the file of another command.
COMMANDS = list(dict.fromkeys(line for line in BASH if re.match(r"python recipes/(?!.*(://|again\.py))", line)))
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.proof  # in short: test_recipes.py, and the flags of all commands in docs/test_docs.py
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_readme(line, tmp_path):
    words = shlex.split(line, comments=True)
    for names in re.findall(r"--backends?=(\S+)", line):
        for name in names.split(","):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed")
    (tmp_path / "my_model.py").write_text(
        "import keras\n"
        "from keras import layers\n"
        "def build(input_shape, num_classes):\n"
        "    return keras.Sequential([keras.Input(input_shape), layers.Flatten(), layers.Dense(num_classes)])\n"
    )
    extra = []
    if words[1] == "recipes/train.py" and "--help" not in words:
        extra = ["--device=cpu", "--max_steps=2", f"--workdir={tmp_path}/run"]
        if "fashion" in line:
            extra.append("--dataset=synthetic")
    if words[1] == "recipes/pipeline.py":
        extra = ["--device=cpu", "--model=mlp", "--split_sizes=12", "--repetitions=2", f"--workdir={tmp_path}/run"]
    if words[1] == "recipes/parity.py":
        extra = ["--max_steps=2", f"--workdir={tmp_path}/run"]
    words = [str(ROOT / word) if word.startswith(("recipes/", "flags/")) else word for word in words[1:]]
    words = [word.replace("--flagfile=", f"--flagfile={ROOT}/") for word in words]
    words = [word.replace("/of/another/venv/bin/python", sys.executable) for word in words]
    done = run(*words, *extra, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",  # parity/test_plugin.py has a test that compares, in short
    [pytest.param(code, marks=[pytest.mark.proof] * ("def test_" in code)) for code in PYTHON],
    ids=range(len(PYTHON)),
)
def test_code_of_the_readme(code, tmp_path):
    file = tmp_path / "test_readme.py"
    file.write_text(code)
    as_test = ("-m", "pytest", f"--parity-backends={BACKENDS[-1]}") if "def test_" in code else ()
    done = run(*as_test, file, cwd=tmp_path, backend=None if as_test else BACKENDS[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert not as_test or "2 passed" in done.stdout


BEFORE = """\
import keras
import numpy as np

x, y = np.random.RandomState(0).rand(200, 8).astype("float32"), np.arange(200) % 3


def build_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="softmax")])


def train():
    model = build_model()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model.fit(x, y, batch_size=64, epochs=5, validation_split=0.2)

history = train()
print(len(history.history["val_loss"]))
"""


def test_the_diff_of_the_readme(tmp_path):
    """Applied to a script whose functions use the Keras that is imported at its top."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = BEFORE
    for hunk in diff.split("\n\n", 1):
        lines = hunk.splitlines()
        before, after = ("".join(line[1:] + "\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    (tmp_path / "script.py").write_text(script)
    done = run("script.py", backend=BACKENDS[0], cwd=tmp_path, KERAS_BACKEND=BACKENDS[0], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "5"


def test_install_commands_of_the_readme():
    """The first two lines are the promise: one installs and runs, the other installs and tests."""
    install, test = BASH[:2]
    assert re.fullmatch(r"pip install -c constraints.txt -e '\.\[jax\]' && python recipes/train.py( --\S+)*", install)
    assert test == "pip install -c constraints.txt -e '.[all,test]' && python -m pytest"
    assert "grep -m1 '^pip install .* && python -m pytest$' README.md" in (ROOT / ".ci" / "run").read_text()
