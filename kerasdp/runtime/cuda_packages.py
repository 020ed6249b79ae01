"""Finds packages of two CUDA versions in one environment, which overwrite each other's files."""

import collections
import importlib.metadata
import re
from collections.abc import Iterable

# cuDNN and NCCL lie in `nvidia/cudnn` and `nvidia/nccl` of site-packages, whatever CUDA they are for. A CUDA runtime
# may be there twice.
_SHARED_FOLDERS = re.compile(r"nvidia-(cudnn|nccl)-cu(\d+)", re.IGNORECASE)


def mixed_cuda_packages(names: Iterable[str] | None = None) -> str:
    """Returns what to say of packages for several CUDA versions; empty if there are none.

    Args:
        names: of the installed packages. None: those of this environment.
    """
    if names is None:
        names = (distribution.metadata["Name"] or "" for distribution in importlib.metadata.distributions())
    found = collections.defaultdict(set)
    for name in names:
        match = _SHARED_FOLDERS.fullmatch(name.replace("_", "-"))
        if match:
            found[match.group(1).lower()].add(int(match.group(2)))
    for part, majors in sorted(found.items()):
        if len(majors) > 1:
            packages = " and ".join(f"nvidia-{part}-cu{major}" for major in sorted(majors))
            versions = " and ".join(map(str, sorted(majors)))
            return (
                f"{packages}, of CUDA {versions}, are in one environment, where they overwrite each other's files: "
                "install each backend into an environment of its own"
            )
    return ""
