"""The house stays as it was drawn: who imports what, how fast, how long."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kerasdp"
FRAMEWORKS = {"torch", "jax", "tensorflow"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path, *, anywhere):
    """Modules that a file imports: at its top (not under TYPE_CHECKING), or anywhere in it."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if anywhere else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def roots(modules):
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports(path):
    name = str(path.relative_to(PACKAGE))
    everything = imports(path, anywhere=True)
    allowed = {
        "runners/torch_ddp.py": {"torch"},
        "runners/torch_collectives.py": {"torch"},
        "runners/torch_elastic.py": {"torch"},
        "runners/jax_sharding.py": {"jax"},
        "runners/tf_mirrored.py": {"tensorflow"},
        "runners/tf_reductions.py": {"tensorflow"},
    }
    assert roots(everything) & FRAMEWORKS <= allowed.get(name, set())
    assert not roots(everything) & {"recipes", "tests", "benchmarks"}
    # A runner may use what all share, and its backend's other modules; never another backend's.
    if name.startswith("runners/"):
        backend = path.stem.partition("_")[0]
        others = {
            path.stem for path in (PACKAGE / "runners").glob("*_*.py") if not path.stem.startswith((backend, "_"))
        }
        assert not {module for module in everything if any(f".{other}" in module for other in others)}
    if name != "cli.py":
        assert "absl" not in roots(everything)
    if name in ("config.py", "spec.py", "errors.py", "backend.py", "launch.py", "cli.py", "replica_context.py"):
        assert "keras" not in roots(imports(path, anywhere=False))
    if name.startswith(("models/", "layers/")):
        assert not {module for module in everything if "runner" in module or "cli" in module}


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, kerasdp; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(loaded) & (FRAMEWORKS | {"keras", "numpy", "absl", "matplotlib"})


def test_recipes_use_public_names_only():
    import kerasdp

    for path in (ROOT / "recipes").glob("*.py"):
        tree = ast.parse(path.read_text())
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kerasdp"
        }
        assert used <= set(kerasdp.__all__), path
        assert roots(imports(path, anywhere=True)) <= {"kerasdp", "keras", "numpy", "os", "functools", "sklearn"}, path
        assert len(path.read_text().splitlines()) <= 70, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_room_is_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 75, f"{node.name} in {path}"
