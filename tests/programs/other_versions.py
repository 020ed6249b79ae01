"""Runs a program in a process in which something says that it has another version.

python other_versions.py WHAT VERSION PROGRAM [ARGUMENT ...]: `python`, or a package.
"""

import importlib
import importlib.metadata
import os
import platform
import runpy
import sys


def pretend(what, version):
    """Lets this process say so, whoever asks in it: the package itself, or what is known of its installation."""
    if what == "python":
        platform.python_version = lambda: version
        return
    found = importlib.metadata.version
    importlib.metadata.version = lambda name: version if name == what else found(name)
    if what != "kerasdp":
        importlib.import_module(what).__version__ = version


if __name__ == "__main__":
    pretend(*sys.argv[1:3])
    del sys.argv[:3]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
