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
# How the names of a backend's modules begin, in the two folders that have such.
PREFIXES = {"torch_": "torch", "jax_": "jax", "tf_": "tensorflow"}
ENGINES = {
    path
    for path in FILES
    if path.parent.name in ("runners", "pipeline", "layers") and path.name.startswith(tuple(PREFIXES))
}


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


def backend_of(path):
    """The backend that a module is for; None if it is for all."""
    return next((name for prefix, name in PREFIXES.items() if path in ENGINES and path.name.startswith(prefix)), None)


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def loaded_by(name):
    """All that is imported, at the top of one file or another, when a module of this package is."""
    files = {module_name(path): path for path in FILES}
    found, new = set(), {name}
    while new:
        found |= new
        new |= {module.rpartition(".")[0] for module in new} - {""}  # the packages that they are in
        new = set().union(*(imports(files[module], anywhere=False) for module in new if module in files)) - found
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports(path):
    name = str(path.relative_to(PACKAGE))
    everything = imports(path, anywhere=True)
    own = backend_of(path)
    assert roots(everything) & FRAMEWORKS <= {own}
    assert not roots(everything) & {"recipes", "tests", "benchmarks"}
    # A runner or engine may use what all share, and its backend's other modules; what all share uses none of them.
    others = {module_name(engine) for engine in ENGINES if backend_of(engine) != own}
    if name.startswith("layers/") or name == "random_numbers.py":  # may ask a small module of the backend in use
        others = {module for module in others if not module.startswith("kerasdp.layers.")}
    assert not everything & others
    if name != "cli.py":
        assert "absl" not in roots(everything)
    if name in (
        "choices.py",
        "config.py",
        "spec.py",
        "errors.py",
        "backend.py",
        "launch.py",
        "cli.py",
        "replica_context.py",
    ):
        assert "keras" not in roots(imports(path, anywhere=False))
    if name.startswith(("models/", "layers/")):
        assert not {module for module in everything if "runner" in module or "cli" in module}


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, kerasdp; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(loaded) & (FRAMEWORKS | {"keras", "numpy", "absl", "matplotlib"})


@pytest.mark.parametrize(
    "path", sorted(path for path in ENGINES if path.parent.name != "layers"), ids=lambda path: path.stem
)
def test_a_runner_loads_no_keras(path):
    """It is imported to say how many GPUs there are, and `Replicas` sets what Keras asks but once, at its import."""
    loaded = loaded_by(module_name(path))
    assert "kerasdp.config" in loaded
    assert "keras" not in roots(loaded)


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
        assert roots(imports(path, anywhere=True)) <= {
            "kerasdp",
            "keras",
            "numpy",
            "os",
            "functools",
            "sklearn",
            "typing",
        }, path
        assert len(path.read_text().splitlines()) <= 70, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_room_is_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 75, f"{node.name} in {path}"
