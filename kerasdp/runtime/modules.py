"""Knows which modules of the caller worker processes can import, and keeps them from running its script again."""

import contextlib
import importlib.machinery
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator
from typing import Any

_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))

_lock = threading.Lock()
_num_contexts = 0
_kept: Any = None


@contextlib.contextmanager
def not_run_again() -> Iterator[None]:
    """Lets processes that `multiprocessing` spawns within the context leave `__main__` as it is.

    Before all else a spawned process runs the file of its parent's `__main__`, or the module that `__main__.__spec__`
    names, but for a package's `__main__.py`, which has no guard (CPython 3.11 to 3.14, multiprocessing/spawn.py). So
    the script gets the name of such a one.
    """
    global _num_contexts, _kept
    main: Any = sys.modules["__main__"]
    with _lock:  # several threads may start runs, as a search with several jobs does
        if _num_contexts == 0:
            _kept, main.__spec__ = getattr(main, "__spec__", None), importlib.machinery.ModuleSpec("__main__", None)
        _num_contexts += 1
    try:
        yield
    finally:
        with _lock:
            _num_contexts -= 1
            if _num_contexts == 0:
                main.__spec__ = _kept


def description() -> tuple[str | None, str | None]:
    """Returns the name by which `__main__` can be imported, and its file."""
    main: Any = sys.modules["__main__"]
    spec = _kept if _num_contexts else getattr(main, "__spec__", None)
    return getattr(spec, "name", None), getattr(main, "__file__", None)


def become(described: tuple[str | None, str | None], names: dict[str, dict[str, Any]]) -> None:
    """Makes this process's `__main__` look like the caller's, to processes that user code starts, and to `pickle`.

    Args:
        described: the caller's `description()`.
        names: functions and classes, by the module that they are from, of `__main__` and of others that cannot be
            imported here.
    """
    main: Any = sys.modules["__main__"]
    name, file = described
    if name is not None:
        main.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if file is not None:
        main.__file__ = file
    for module, known in names.items():
        if module not in sys.modules and known:
            sys.modules[module] = types.ModuleType(module)
        vars(sys.modules.get(module, main)).update(known)


def can_be_imported(module: types.ModuleType) -> bool:
    """Returns whether a new process that imports the name of a module gets this one."""
    path = getattr(module, "__file__", None) or ""
    if not path.endswith(".py") or os.path.abspath(path).startswith(_INSTALLED):
        return True  # an extension, say
    spec = _find(module.__name__)
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(path)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """Returns where a new process would find a module: unlike `importlib.util.find_spec`, whatever is loaded here."""
    parent = name.rpartition(".")[0]
    found = _find(parent) if parent else None
    if parent and found is None:
        return None
    places = found.submodule_search_locations if found is not None else None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, places) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None
