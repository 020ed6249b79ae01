"""Chooses the backend and the devices of a run, before Keras is first imported."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import re
import sys

from kerasdp.config import Config
from kerasdp.config.validation import BACKENDS
from kerasdp.errors import UserError

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
        kind: `"gpu"`, `"cpu"`, or, with jax, `"tpu"` or what else its plug-ins bring.
        count: number of devices, one replica each. CPU devices are virtual: parts of the one machine.
        reason: why the devices are CPU devices: `"no GPU found"`, `"as asked"`; empty for others.
    """

    kind: str
    count: int
    reason: str = ""

    def __str__(self) -> str:
        plural = "s" if self.count > 1 else ""
        if self.is_accelerator:
            return f"{self.count} {self.kind.upper()}{plural}"
        return f"{self.count} virtual CPU device{plural} ({self.reason})"

    @property
    def is_accelerator(self) -> bool:
        """Returns whether the devices have memory of their own, and work beside the CPU."""
        return self.kind != "cpu"


class AlreadyStartedError(Exception):
    """This process has started a framework otherwise than a run asks for, which only a new process can change."""


def is_installed(backend: str) -> bool:
    """Returns whether the backend's framework can be imported (nothing is imported to find out)."""
    return importlib.util.find_spec(backend) is not None


def choose_backend(name: str | None) -> str:
    """Returns the backend to use: `name`, else that of a Keras that is already imported, else what Keras would take.

    Which is $KERAS_BACKEND, else keras.json. With none of these: the first installed. Keras is not imported to find
    out.

    Raises:
        UserError: if it is unknown or not installed; the text holds the command that installs it.
    """
    choices = [("--backend", name)]
    if name is None:
        choices = [
            ("the Keras that is already imported", _backend_of_imported_keras()),
            ("KERAS_BACKEND", os.environ.get("KERAS_BACKEND")),
            (_keras_json(), _backend_of_file()),
            ("", next((backend for backend in BACKENDS if is_installed(backend)), None)),
        ]
    source, found = next(((source, choice) for source, choice in choices if choice), ("", None))
    if found is None:
        raise UserError("no backend is installed; add one: pip install 'kerasdp[jax]' (or torch, or tensorflow)")
    if found not in BACKENDS:
        instead = "" if source == "--backend" else "; choose one of them with --backend=NAME"
        raise UserError(f"{source}: expected one of {', '.join(BACKENDS)} as backend. Received: {found!r}{instead}")
    if not is_installed(found):
        have = ", ".join(backend for backend in BACKENDS if is_installed(backend)) or "none"
        raise UserError(
            f"{source}: {found} is not installed (installed: {have}); add it: pip install 'kerasdp[{found}]' "
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


def choose_devices(config: Config, num_found: int, kind: str = "gpu") -> Devices:
    """Returns the devices to use.

    Args:
        config: `num_devices` and `device` are read.
        num_found: GPUs, or devices of another kind than the CPU, that the backend sees.
        kind: of these.

    Raises:
        UserError: if there are some GPUs but fewer than asked for, or none though GPUs were asked for.
    """
    if config.device not in ("auto", "cpu") and (num_found == 0 or config.device != kind):
        others = f", but {num_found} of kind {kind}" if num_found else ""
        raise UserError(
            f"--device={config.device}: this backend sees no {config.device.upper()}{others}; use --device=auto for "
            "what there is, or --device=cpu for virtual CPU devices"
        )
    if config.device == "cpu" or num_found == 0:
        reason = "as asked" if config.device == "cpu" else "no GPU found"
        if reason != "as asked" and os.path.exists("/dev/nvidia0"):
            # The plain packages of jax and tensorflow hold no CUDA.
            reason = f"{config.backend} sees no GPU here: pip install 'kerasdp[{config.backend}-cuda]'"
        elif reason != "as asked" and config.backend == "jax" and os.path.exists("/dev/accel0"):
            reason = "jax sees no TPU here: pip install 'kerasdp[jax-tpu]'"
        devices = Devices(kind="cpu", count=config.num_devices or 1, reason=reason)
    else:
        count = config.num_devices or num_found
        if count > num_found:
            raise UserError(
                f"--gpus: there {'is' if num_found == 1 else 'are'} {num_found}. Received: {count}; "
                f"ask for at most {num_found}, or use --device=cpu for virtual CPU devices"
            )
        devices = Devices(kind=kind, count=count)
    config.check_replicas(config.num_replicas(devices.count))
    return devices


def gpus_to_see(num_devices: int | None, folder: str = "/dev") -> str | None:
    """Returns the numbers of the first NVIDIA GPUs, as `"0,1"`, if there are more of them than a run uses.

    No framework is asked, since that would start it.

    Args:
        num_devices: that the run uses; None: all.
        folder: of the devices' files.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    files = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(folder))
    found = files if visible is None else min(files, len([name for name in visible.split(",") if name.strip()]))
    if num_devices is None or num_devices >= found:
        return None
    return ",".join(map(str, range(num_devices)))


def cache_folder(name: str) -> str | None:
    """Returns a folder of this user for what a backend compiles; None if nothing can be written there.

    One for each kind of CPU: home folders are shared by machines, and programs for one may not run on another.
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
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
