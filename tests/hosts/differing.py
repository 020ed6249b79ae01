"""What of `kerasdp.Config` hosts of one run may have differently, and a second value of each field."""

import dataclasses
from typing import Any

from tests.helpers import BACKENDS, HOST_BACKENDS

_ON_TORCH = tuple(name for name in ("torch",) if name in BACKENDS)
_ON_JAX = tuple(name for name in ("jax",) if name in BACKENDS)


@dataclasses.dataclass(frozen=True)
class Differs:
    """A field that all hosts have alike.

    Attributes:
        value: on host 1.
        both: other fields that it takes, on both hosts.
        backends: on which the value is none that a host refuses by itself, before it joins.
    """

    value: Any
    both: dict[str, Any] = dataclasses.field(default_factory=dict)
    backends: tuple[str, ...] = tuple(HOST_BACKENDS)


@dataclasses.dataclass(frozen=True)
class Free:
    """A field that each host has for itself, and a value on host 1."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Alone:
    """A field with which a host does not come to the others, and why."""

    reason: str


_PIPELINE = {"strategy": "pipeline"}
# Of each field of `Config`. {folder} is of the run.
FIELDS: dict[str, Differs | Free | Alone] = {
    "backend": Alone("torch's and JAX's processes meet at different places"),
    "num_devices": Differs(2, backends=_ON_JAX),
    "device": Differs("auto"),
    "strategy": Differs("pipeline", backends=_ON_TORCH),
    "cut_at": Differs("flatten", _PIPELINE | {"cut_at": "dense1"}, _ON_TORCH),
    "split_size": Differs(8, _PIPELINE | {"split_size": 16}, _ON_TORCH),
    "model": Differs("lenet"),
    "dataset": Differs("synthetic(shape=(8,8,1), num_classes=10)"),
    "data_dir": Free("{folder}/data"),
    "remat": Differs("dense*"),
    "shard": Differs("weights", {"shard": "optimizer"}),
    "batch_size": Differs(32),
    "accumulate": Differs(2),
    "epochs": Differs(2),
    "max_steps": Differs(9, {"max_steps": 12}),
    "optimizer": Differs("adam"),
    "learning_rate": Differs(0.5, {"learning_rate": 0.25}),
    "batch_norm": Differs("replica"),
    "precision": Differs("bfloat16"),
    "compile": Differs("off", backends=_ON_TORCH),
    "check": Differs("off"),
    "seed": Differs(1),
    "deterministic": Differs(True),
    "workdir": Free("{folder}/of-host-1"),
    "log_every": Differs(5),
    "verbose": Free(2),
    "tracker": Free("tensorboard"),
    "checkpoint_every": Differs("7"),
    "checkpoint_dir": Free("{folder}/checkpoints-of-host-1"),
    "checkpoint_weights": Differs("trained"),
    "keep": Differs(2),
    "resume": Free(True),
    "max_restarts": Differs(1, backends=_ON_JAX),
    "hang_timeout": Differs(300.0, {"hang_timeout": 400.0}),
}
