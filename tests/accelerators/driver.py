"""Makes a driver of NVIDIA for a machine without one: programs find it by LD_LIBRARY_PATH."""

import shutil
import subprocess

import pytest

DRIVER = """
static int is_started = 0;
int cuInit(unsigned flags) { is_started = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = NUM_GPUS; return !is_started; }
"""


def make_driver(folder, num_gpus):
    """Compiles libcuda of so many GPUs into a folder, which it returns; skips the test without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "driver.c").write_text(DRIVER)
    command = [compiler, f"-DNUM_GPUS={num_gpus}", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder)
