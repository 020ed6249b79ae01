"""Makes a driver of NVIDIA that answers what a test says: programs find it by LD_LIBRARY_PATH."""

import shutil
import subprocess

import pytest


def make_driver(folder, source):
    """Compiles the C code as libcuda into a folder, which it returns; skips the test without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "driver.c").write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return str(folder)
