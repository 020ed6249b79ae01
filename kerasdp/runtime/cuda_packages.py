"""Finds libraries of two versions of CUDA in one environment, which have overwritten each other."""

import importlib.metadata
import re
import sys

_OF_CUDA = re.compile(r"(nvidia-.+)-cu(\d\d)")


def clash_of_cuda_packages(path: list[str] | None = None) -> str | None:
    """Returns a line that names packages for two versions of CUDA which share a folder; None if there are none.

    `nvidia-cudnn-cu12` and `nvidia-cudnn-cu13` both write `nvidia/cudnn/lib/libcudnn.so.9`, and so do those of nccl,
    nvshmem and cusparselt: what was installed last is what the other one's framework gets. Packages without a suffix
    (`nvidia-cublas` and others of CUDA 13) have a folder of their own, `nvidia/cu13`.

    Args:
        path: folders with installed packages. None: those of this interpreter.
    """
    found: dict[str, dict[int, str]] = {}
    for distribution in importlib.metadata.distributions(path=sys.path if path is None else path):
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if matched := _OF_CUDA.fullmatch(name):
            found.setdefault(matched[1], {})[int(matched[2])] = name
    clashes = {library: names for library, names in found.items() if len(names) > 1}
    if not clashes:
        return None
    versions = sorted({version for names in clashes.values() for version in names})
    packages = [name for library in sorted(clashes) for _, name in sorted(clashes[library].items())]
    return (
        f"packages of CUDA {' and '.join(map(str, versions))} have overwritten each other in this environment: "
        f"{', '.join(packages)}; use one environment for each backend (docs/accelerators.md)"
    )
