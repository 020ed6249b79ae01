"""The house stays as it was drawn: who imports what, how fast, how long."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kerasdp"
FRAMEWORKS = {"torch", "jax", "tensorflow"}
FILES = sorted(PACKAGE.rglob("*.py"))
# From the ground up. A room imports from those of its own line and the lines before it.
FLOORS = (
    ("errors",),
    ("config", "keras_compat", "sharding"),
    ("processes", "run_state", "data"),
    ("contract",),
    ("same", "reporting"),
    ("models", "checkpoint"),
    ("step",),
    ("backends",),
    ("training",),
    ("scale",),
    ("launch",),
    ("parity",),
    ("cli", "flags", "pytest_plugin"),
    ("__main__",),
)
# What is loaded by the backend's name when the program runs, instead of imported: engines by `launch`; and from
# same/ and step/, which also work outside of a run, their backend's own arithmetic, which knows nothing of the kit but
# what lies below.
KERNELS = ("batch_norm", "gradients", "xla")
FOR_KERNELS = (*KERNELS, "collectives", "private")
# What is imported before the choice of a backend, or where there is no Keras.
WITHOUT_KERAS = ("config/", "cli/", "processes/", "run_state.py", "errors.py", "launch.py", "same/replica_context.py")


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    return list(ast.walk(tree_of(path)))


@functools.cache
def imports(path, *, anywhere):
    """Modules that a file imports: at its top (not under TYPE_CHECKING), or anywhere in it."""
    nodes = nodes_of(path) if anywhere else tree_of(path).body
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def modules_imported_by(path):
    """Of this package, anywhere in the file. A package counts where one of its own names is asked for."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "kerasdp":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found - {"kerasdp", module_name(path)}


def roots(modules):
    return {module.partition(".")[0] for module in modules}


def room_of(module):
    return module.split(".")[1]


def floor_of(module):
    return next(number for number, rooms in enumerate(FLOORS) if room_of(module) in rooms)


def backend_of(path):
    """The backend that a module is for; None if it is for all."""
    if path.parent.name == "scale" and path.stem.partition("_")[0] in FRAMEWORKS:
        return path.stem.partition("_")[0]
    return path.parent.name if path.parent.parent.name == "backends" else None


def loaded_by(name):
    """All that is imported, at the top of one file or another, when a module of this package is."""
    found, new = set(), {name}
    while new:
        found |= new
        new |= {module.rpartition(".")[0] for module in new} - {""}  # the packages that they are in
        new = set().union(*(imports(MODULES[module], anywhere=False) for module in new if module in MODULES)) - found
    return found


def forbidden_imports(path):
    """Yields modules that a file imports, and whose room is not to be used there."""
    name = str(path.relative_to(PACKAGE))
    everything, own_modules = roots(imports(path, anywhere=True)), modules_imported_by(path)
    own = backend_of(path)
    yield from everything & (FRAMEWORKS - {own} | {"recipes", "tests", "benchmarks"})
    # A backend's modules use what all share and one another; what all share, and other backends, use none of them.
    yield from {module for module in own_modules if backend_of(MODULES[module]) not in (None, own)}
    if own is not None and path.stem in KERNELS:
        beside = {f"kerasdp.backends.{own}.{stem}" for stem in FOR_KERNELS} | {f"kerasdp.backends.{own}"}
        yield from {one for one in own_modules - beside if floor_of(one) >= floor_of("kerasdp.same")}
    yield from everything & {"ray"}
    if not name.startswith(("cli/", "flags.py", "processes/sending.py")):
        yield from everything & {"absl"}
    if name.startswith(WITHOUT_KERAS):
        yield from roots(imports(path, anywhere=False)) & {"keras"}


def test_imports():
    found = {str(path.relative_to(PACKAGE)): sorted(forbidden_imports(path)) for path in FILES}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_no_import_goes_up():
    inner = {name: path for name, path in MODULES.items() if name != "kerasdp"}  # the door: it names what is public
    assert [
        f"{own} imports {module}, which is above it"
        for own, path in inner.items()
        for module in modules_imported_by(path)
        if floor_of(module) > floor_of(own)
    ] == []


def test_no_import_circle():
    """Neither among modules nor among rooms, wherever in a file an import stands."""
    modules = {name: modules_imported_by(path) for name, path in MODULES.items() if name != "kerasdp"}
    # What a package hands on from its own modules is no arrow to it from them.
    rooms = {room_of(name): set() for name in modules}
    for name, imported in modules.items():
        rooms[room_of(name)] |= {room_of(module) for module in imported} - {room_of(name)}
    for arrows in (modules, rooms):
        left = dict(arrows)
        while left:
            free = [name for name, imported in left.items() if not imported & left.keys() - {name}]
            assert free, f"a circle among {sorted(left)}"
            for name in free:
                del left[name]


def modules_loaded_by_name(path):
    """The last part of the names of the backends' modules that a file loads with `import_module`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = ast.unparse(node.args[0]).strip("f'\"")
            if name.startswith("kerasdp.backends."):
                yield name.rpartition(".")[2]


def test_what_is_loaded_by_name_is_no_way_around_the_floors():
    """Below the backends only their arithmetic, which imports nothing from there or above."""
    found = {
        f"{name} loads {loaded}"
        for name, path in MODULES.items()
        if name != "kerasdp" and floor_of(name) < floor_of("kerasdp.backends")
        for loaded in modules_loaded_by_name(path)
        if loaded not in KERNELS
    }
    assert not found
    around = [path for room in ("same", "step") for path in (PACKAGE / room).glob("*.py")]
    loaded = {one for path in around for one in modules_loaded_by_name(path)}
    assert loaded == set(KERNELS)


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, kerasdp; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(loaded) & (FRAMEWORKS | {"keras", "numpy", "absl", "matplotlib"})


def is_engine(path):
    is_of_scale = path.parent.name == "scale" and not path.stem.endswith("remat")
    return backend_of(path) and (path.stem in ("data_parallel", "devices") or is_of_scale)


@pytest.mark.parametrize("path", list(filter(is_engine, FILES)), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_engine_loads_no_keras(path):
    """It is imported before Keras, and sets what Keras asks but once, at its import."""
    loaded = loaded_by(module_name(path))
    assert "kerasdp.config" in loaded
    assert "keras" not in roots(loaded)


def test_recipes_use_public_names_only():
    import kerasdp

    for path in (ROOT / "recipes").glob("*.py"):
        used = {
            node.attr
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kerasdp"
        }
        assert used <= set(kerasdp.__all__), path
        modules = imports(path, anywhere=True)
        # The lesson shows what the engines do: each framework's gradient, and all of it in one file.
        is_lesson = path.name == "from_scratch.py"
        assert is_lesson or not roots(modules) & FRAMEWORKS, path
        assert not [
            module
            for module in modules
            if module.startswith(("kerasdp.", "keras.src", "tests")) and not module.startswith("kerasdp.models")
        ], path
        # All that these do is in the recipe, and its flags.
        assert len(path.read_text().splitlines()) <= (187 if is_lesson else 125), path


def test_every_function_is_short():
    assert [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno - node.lineno - len((ast.get_docstring(node) or "").splitlines()) >= 60
    ] == []


# Private names that are not Keras': of the standard library, and the kit's own objects, which `_` keeps in their room.
PRIVATE_NAMES_OF_OTHERS = {
    "_exit", "_replace",  # os, named tuples
    "_worker",  # tensorboardX: its writing thread
    # Runner: what is no one's business but the package's.
    "_continued_scope", "_loop", "_made_before", "_model_steps", "_num_model_calls", "_training_function",
    "_transforms",
}  # fmt: skip
MODULES_FOR_PRIVATE_NAMES = [
    PACKAGE / "keras_compat",
    *(PACKAGE / "backends" / name / "private.py" for name in FRAMEWORKS),
]


def private_names(path):
    """Underscore names that a file reads of others' objects, and private modules that it imports."""
    nodes = nodes_of(path)
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_self(node.value)}
    found = set()
    for node in nodes:
        name = ""
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            name = node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        if name.startswith("_") and not name.startswith("__") and name not in own | PRIVATE_NAMES_OF_OTHERS:
            found.add(name)
    modules = imports(path, anywhere=True)
    found |= {
        module
        for module in modules
        if module.startswith("keras.src")
        or (roots([module]) & FRAMEWORKS and any(p[:1] == "_" or p == "python" for p in module.split(".")[1:]))
    }
    return found


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_private_names_stand_in_one_place():
    others = [path for path in FILES if not any(path.is_relative_to(place) for place in MODULES_FOR_PRIVATE_NAMES)]
    found = {
        str(path.relative_to(PACKAGE)): sorted(name for name in private_names(path) if name[:8] != "_kerasdp")
        for path in others
    }
    assert {name: names for name, names in found.items() if names} == {}


# Who else assigns to attributes of objects that are not the kit's, or have a name that Keras' objects have: and why.
ASSIGNED_ELSEWHERE = {
    "backends/torch/devices.py": ("torch.backends.", "torch's own switches"),
    "backends/torch/graph_passes.py": ("setattr(module", "a graph that the kit has made"),
    "checkpoint/state.py": ("setattr(callback", "a checkpoint gives a callback its state back"),
    "config/choices.py": (("record.__doc__", "object.__setattr__(record"), "the kit's own"),
    "data/datasets.py": ("data.", "the kit's own"),
    "errors.py": ("sys.excepthook", "Python's own switch"),
    "step/global_batch.py": ("setattr(definition, _DECLARED", "a mark at what a decorator gets"),
    "step/row_search.py": ("layout.outputs", "the kit's own"),
    "run_state.py": ("object.__setattr__(model, _ATTRIBUTE", "an attribute of the kit's"),
    "processes/signals.py": ("sys.unraisablehook", "Python's own switch"),
    "processes/sending.py": ("flags.FLAGS[name].value", "what the command line says"),
    "parity/trace.py": ("model.stop_training", "what Keras' callbacks set"),
    "training/loop.py": ("model.stop_", "what Keras' callbacks set"),
    "training/callbacks.py": (("model.", "self._trained."), "stop_training, learning_rate: what Keras' callbacks set"),
}
CHANGES = """
layer.call = call
del optimizer.apply
vars(model)["train_function"] = function
setattr(loss, name, call)
object.__setattr__(layer, "built", True)
import torch
torch.as_tensor = as_tensor
"""


def test_objects_of_others_are_changed_in_one_place():
    """Whoever changes how Keras or a framework works while the program runs does it in keras_compat, by one helper."""
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    kinds = (keras.optimizers.LossScaleOptimizer, keras.Variable, keras.layers.LSTM, keras.callbacks.Callback)
    objects = (model, model.layers[0], model.optimizer, keras.initializers.GlorotUniform(), keras.losses.Huber())
    names = {name for one in (*kinds, *objects, keras.metrics.Mean()) for name in dir(one)}

    def is_changed(node, modules):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            root = ast.unparse(node).partition(".")[0]
            is_own = is_self(node.value) or root == "ctx"  # of a torch.autograd.Function
            return not is_own and (node.attr in names or root in modules)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            return ast.unparse(node.value).startswith("vars(") or ast.unparse(node.value).endswith(".__dict__")
        setters = ("setattr", "delattr", "object.__setattr__", "object.__delattr__")
        return isinstance(node, ast.Call) and ast.unparse(node.func) in setters and not is_self(node.args[0])

    def changes(text):
        nodes = list(ast.walk(ast.parse(text)))
        modules = {alias.asname or alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and not node.module.startswith("kerasdp")
            for alias in node.names
        }
        return [ast.unparse(node) for node in nodes if is_changed(node, modules)]

    assert len(changes(CHANGES)) == 6
    found = []
    for path in FILES:
        allowed, _ = ASSIGNED_ELSEWHERE.get(str(path.relative_to(PACKAGE)), ("nothing", ""))
        if not any(path.is_relative_to(place) for place in MODULES_FOR_PRIVATE_NAMES):
            found += [(path.name, change) for change in changes(path.read_text()) if not change.startswith(allowed)]
    assert not found
