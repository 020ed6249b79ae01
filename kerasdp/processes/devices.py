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
    """The devices of a run.

    Args:
        kind: `"gpu"`, `"tpu"` or `"cpu"`; with jax also what a plug-in calls its devices.
        count: number of devices over all machines, one replica each. CPU devices are virtual: parts of one machine.
        reason: why the devices are CPU devices: `"no GPU found"`, `"as asked"`; empty for others.
        cluster: which of the processes this is that were started for the run; None: the only one.
    """

    kind: str
    count: int
    reason: str = ""
    cluster: Cluster | None = None

    @property
    def is_accelerator(self) -> bool:
        """Returns whether the devices have memory and arithmetic of their own, as GPUs and TPUs."""
        return self.kind != "cpu"

    def __str__(self) -> str:
        plural = "s" if self.count > 1 else ""
        processes = f" of {self.cluster.num_processes} processes" if self.cluster else ""
        if self.is_accelerator:
            return f"{self.count} {self.kind.upper()}{plural}{processes}"
        return f"{self.count} virtual CPU device{plural}{processes} ({self.reason})"


class AlreadyStartedError(Exception):
    """This process has started a framework otherwise than a run asks for, which only a new process can change."""


def is_installed(package: str) -> bool:
    """Returns whether a package, as the framework of a backend, can be imported; nothing is imported to find out."""
    return importlib.util.find_spec(package) is not None


def choose_backend(name: str | None) -> str:
    """Returns the backend to use: `name`, else that of a Keras that is already imported, else what Keras would take.

    Which is $KERAS_BACKEND, else keras.json. With none of these: the first installed. Keras is not imported to find
    out.

    Raises:
        UserError: if it is unknown or not installed; the text holds the command that installs it.
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
    """Makes Keras use the backend, in this process and in those that it starts.

    Raises:
        AlreadyStartedError: if Keras has been imported with another one, which nothing can change any more.
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
    """Returns the backend in keras.json, None where nobody has chosen it.

    Keras (3.15) writes the file when it is first imported, whatever the backend then is, with all its defaults. As a
    choice that would be another backend for the second run than for the first, and maybe one that is not installed.
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
    """Returns the devices to use.

    Args:
        config: `num_devices` and `device` are read.
        num_found: GPUs, or other accelerators, that the backend sees, and that are this process's.
        kind: what they are, as in `Devices`.
        cluster: of this process, among others.
        is_rank: whether each of these has one device.

    Raises:
        UserError: if NVIDIA's driver has some, and the backend sees none; if there are some but fewer than asked for,
            or none though they were asked for.
    """
    may_have_gpus = config.backend is not None and config.device in ("auto", "gpu")
    if num_found == 0 and may_have_gpus and (why := hardware.why_unseen(str(config.backend))):
        raise UserError(f"{why}; --device=cpu trains on virtual CPU devices")
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
                f"--gpus: there {'is' if num_found == 1 else 'are'} {num_found}. Received: {count}; "
                f"ask for at most {num_found}, or use --device=cpu for virtual CPU devices"
            )
        devices = Devices(kind=kind, count=count * num_processes, cluster=cluster)
    config.check_replicas(config.num_replicas(devices.count))
    return devices


def cache_folder(name: str) -> str | None:
    """Returns a folder of this user alone for what a backend compiles; None if there can be none.

    What lies there is run: another user has not made it, and cannot write there. One for each kind of CPU: home folders
    are shared by machines, and programs for one may not run on another. Nothing is deleted there, as JAX and torch
    delete nothing in caches of their own.
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
            return None  # where HOME is that of another user, or of all
        os.chmod(folder, 0o700)
    except OSError:
        return None
    return folder
