"""Chooses the backend and the devices of a run, before Keras is first imported."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import sys

from kerasdp.config import BACKENDS, Config
from kerasdp.errors import UserError
from kerasdp.processes import hardware
from kerasdp.processes.ranks import Cluster

_WRITTEN_BY_KERAS = {
    "floatx": "float32",
    "epsilon": 1e-07,
    "backend": "tensorflow",
    "image_data_format": "channels_last",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """The kind and the number of the devices of a run, and the processes that use the devices.

    Args:
        kind: `"gpu"`, `"tpu"`, `"cpu"`, or with jax the platform name of a plug-in.
        count: number of devices over all machines, with one replica each. CPU devices are virtual: several of them use
            the same CPU.
        reason: reason why the devices are CPU devices: `"no GPU found"` or `"as asked"`. Empty for GPUs and TPUs.
        cluster: the `Cluster` of this process. None: the run has only this process.
    """

    kind: str
    count: int
    reason: str = ""
    cluster: Cluster | None = None

    @property
    def is_accelerator(self) -> bool:
        """Returns whether the devices are GPUs, TPUs or other accelerators, which have separate memory."""
        return self.kind != "cpu"

    def __str__(self) -> str:
        plural = "s" if self.count > 1 else ""
        processes = f" of {self.cluster.num_processes} processes" if self.cluster else ""
        if self.is_accelerator:
            return f"{self.count} {self.kind.upper()}{plural}{processes}"
        return f"{self.count} virtual CPU device{plural}{processes} ({self.reason})"


class AlreadyStartedError(Exception):
    """Raised if this process has already started a framework with settings that do not fit the run.

    The settings cannot be changed after the start. So the run needs a new process.
    """


def is_installed(package: str) -> bool:
    """Returns whether a package, such as a backend's framework, can be imported. Does not import the package."""
    return importlib.util.find_spec(package) is not None


def choose_backend(name: str | None) -> str:
    """Returns the backend of the run, without importing Keras.

    The backend is the first of these that is set: `name`, the backend of Keras if Keras is already imported,
    $KERAS_BACKEND, the backend in keras.json. If none of these is set, it is the first installed backend.

    Raises:
        UserError: if the backend is unknown or not installed. The message contains the command that installs it.
    """
    have = [backend for backend in BACKENDS if is_installed(backend)]
    choices = {
        "--backend": name,
        "the Keras that is already imported": _backend_of_imported_keras(),
        "KERAS_BACKEND": os.environ.get("KERAS_BACKEND"),
        _keras_json(): _backend_of_file(),
        "": have[0] if have else None,
    }
    source, found = next((pair for pair in choices.items() if pair[1]), ("", None))
    if found is None:
        raise UserError("no backend is installed; add one: pip install 'kerasdp[jax]' (or torch, or tensorflow)")
    if found not in BACKENDS:
        instead = "" if source == "--backend" else "; choose one of them with --backend=NAME"
        raise UserError(f"{source}: expected one of {', '.join(BACKENDS)} as backend. Received: {found!r}{instead}")
    if found not in have:
        raise UserError(
            f"{source}: {found} is not installed (installed: {', '.join(have) or 'none'}); add it: "
            f"pip install 'kerasdp[{found}]' "
            f"(in a checkout: pip install -c constraints.txt -e '.[{found}]')"
        )
    return found


def set_backend(name: str) -> None:
    """Selects the Keras backend for this process and for the processes that it starts.

    Raises:
        AlreadyStartedError: if Keras is already imported with another backend. Keras cannot change its backend.
    """
    os.environ["KERAS_BACKEND"] = name
    # Warnings and errors of TensorFlow only.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    current = _backend_of_imported_keras()
    if current not in (None, name):
        raise AlreadyStartedError(f"Keras is already imported with the {current} backend")


def _backend_of_imported_keras() -> str | None:
    return sys.modules["keras"].config.backend() if "keras" in sys.modules else None


def _keras_json() -> str:
    return os.path.join(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras"), "keras.json")


def _backend_of_file() -> str | None:
    """Returns the backend that the user chose in keras.json; None if the user did not choose a backend.

    Keras (3.15) writes keras.json at its first import, with all defaults. A file with exactly this content is ignored.
    Otherwise the second run might use another backend than the first run, even a backend that is not installed.
    """
    try:
        with open(_keras_json()) as file:
            chosen = json.load(file)
    except (OSError, ValueError):  # which Keras ignores, too
        return None
    if not isinstance(chosen, dict) or chosen == _WRITTEN_BY_KERAS:
        return None
    return chosen.get("backend")


def choose_devices(
    config: Config, num_found: int, kind: str = "gpu", cluster: Cluster | None = None, *, is_rank: bool = False
) -> Devices:
    """Chooses the kind and the number of the devices of a run.

    Args:
        config: configuration of the run. The function reads `backend`, `num_devices`, `device`, and the options that
            determine the number of replicas.
        num_found: number of accelerators, such as GPUs, that the backend sees and this process may use.
        kind: kind of these accelerators, as in `Devices`.
        cluster: the `Cluster` of this process. None: the run has only this process.
        is_rank: whether each process of the run has exactly one device.

    Raises:
        UserError: if the NVIDIA driver has GPUs but the backend sees no GPU; if there are fewer accelerators than
            `num_devices`; if `device` requires an accelerator and there is none; if the global batch cannot be split
            over the replicas.
    """
    may_have_gpus = config.backend is not None and config.device in ("auto", "gpu")
    if num_found == 0 and may_have_gpus and (why := hardware.why_unseen(str(config.backend))):
        raise UserError(f"{why}; or use --device=cpu to train on virtual CPU devices")
    if config.device not in ("auto", "cpu") and num_found == 0:
        raise UserError(
            f"--device={config.device}: this backend sees no {config.device.upper()}; use --device=cpu for virtual CPU "
            "devices, or see docs/accelerators.md"
        )
    asked = 1 if is_rank else config.num_devices
    num_processes = cluster.num_processes if cluster else 1
    if config.device == "cpu" or num_found == 0:
        reason = "as asked" if config.device == "cpu" else "no GPU found"
        devices = Devices(kind="cpu", count=(asked or 1) * num_processes, reason=reason, cluster=cluster)
    else:
        count = asked or num_found
        if count > num_found:
            raise UserError(
                f"--gpus: this process can use {num_found} {kind.upper()}{'' if num_found == 1 else 's'}. "
                f"Received: {count}; ask for at most {num_found}, or use --device=cpu for virtual CPU devices"
            )
        devices = Devices(kind=kind, count=count * num_processes, cluster=cluster)
    config.check_replicas(config.num_replicas(devices.count))
    return devices


def cache_folder(name: str) -> str | None:
    """Returns a private folder for the compiled programs of a backend; None if there is no safe folder.

    The programs in the folder are executed. So the folder must belong to this user, and nobody else may write to it.
    Each kind of CPU has a separate folder: machines may share a home folder, and a program that was compiled for one
    CPU may fail on another. kerasdp deletes nothing in the folder. JAX and torch do not delete files in their caches
    either.
    """
    try:
        with open("/proc/cpuinfo") as file:
            kind = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        kind = platform.processor()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(home, "kerasdp", f"{name}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}")
    try:
        os.makedirs(folder, exist_ok=True)
        if {os.stat(place).st_uid for place in (home, os.path.dirname(folder), folder)} - {0, os.getuid()}:
            return None  # HOME belongs to another user, or to everybody
        os.chmod(folder, 0o700)
    except OSError:
        return None
    return folder
