"""Holds the models of this folder by name, and makes data for them."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

ROWS, BATCH, EPOCHS = 18, 9, 3  # six steps; nine rows do not divide by two devices
CLASSES = 3
KINDS = {
    "hub": "tests.real_code.models_hub",
    "hub_vision": "tests.real_code.models_hub_vision",
    "hub_tasks": "tests.real_code.models_hub_tasks",
    "applications": "tests.real_code.models_applications",
    "vision": "tests.real_code.models_vision",
    "video": "tests.real_code.models_video",
    "text": "tests.real_code.models_text",
    "time": "tests.real_code.models_time",
    "generative": "tests.real_code.models_generative",
    "tables": "tests.real_code.models_tables",
    "graphs": "tests.real_code.models_graphs",
    "contrastive": "tests.real_code.models_contrastive",
}
STRANGERS = {
    "state": "tests.strangers.models_state",
    "training": "tests.strangers.models_training",
    "layers": "tests.strangers.models_layers",
    "networks": "tests.strangers.models_networks",
}
GALLERIES = {"real_code": KINDS, "strangers": STRANGERS}
REGISTRY: dict[str, "Case"] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """Rates of SGD (with a momentum of 0.9) and Adam, and Adam's epsilon; `why` they are not the usual ones."""

    sgd: float = 0.003
    adam: float = 0.001
    epsilon: float = 1e-7
    why: str = ""


GROWING = Steps(
    sgd=1e-6,
    adam=1e-6,
    why="With the usual learning rates, each step multiplies rounding errors by a hundred, also in float64 and on a "
    "single backend. The reason is batch norm over nine rows of noise, which divides by almost zero.",
)
STILL = Steps(
    epsilon=1e-3,
    why="KerasHub computes this softmax in float32, also in a float64 model. For some weights, such as the bias of the "
    "keys, the gradient is only rounding. With the usual epsilon, Adam moves these weights by the sign of the "
    "rounding.",
)
OTHER_STEPS: dict[str, Steps] = {
    "app MobileNet": GROWING,
    "app MobileNetV2": GROWING,
    "app InceptionV3": GROWING,
    "hub DebertaV3": STILL,
    "task DebertaV3TextClassifier": STILL,
    "hub MobileNetV5": Steps(
        sgd=1e-5, why="KerasHub computes the norms of this model in float32, also in a float64 model."
    ),
    "residual_forecast": Steps(sgd=1e-5, why="The gradient of a percentage error is large."),
}


@dataclasses.dataclass(kw_only=True)
class Ready:
    """A model that was built, and what is trained with it. The loss None is crossentropy on the logits of classes."""

    model: Any
    x: Any
    y: Any = None
    loss: Any = None
    compile: dict[str, Any] = dataclasses.field(default_factory=dict)
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Trains by itself, with this callback, and returns the model: something around a model, as a wrapper.
    train: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model by name; `make` builds it with a generator of random numbers for the data."""

    name: str
    kind: str
    make: Callable[[np.random.RandomState], Ready]
    draws: bool = False  # random numbers while it trains, which are others in Keras' own fit


def case(kind: str, name: str | None = None, draws: bool = False) -> Callable[..., Any]:
    """Registers a function that builds a model, under its own name if no other is given."""

    def register(make: Callable[[np.random.RandomState], Ready]) -> Any:
        key = name or make.__name__
        assert key not in REGISTRY, key
        REGISTRY[key] = Case(name=key, kind=kind, make=make, draws=draws)
        return make

    return register


def load_cases(gallery: str = "real_code") -> dict[str, Case]:
    """All models of a gallery, in the order in which they stand in the files."""
    for module in GALLERIES[gallery].values():
        importlib.import_module(module)
    return REGISTRY


def classes(random: np.random.RandomState, num_rows: int = ROWS) -> np.ndarray:
    return random.randint(0, CLASSES, num_rows).astype("int32")


def images(random: np.random.RandomState, size: int = 32, channels: int = 3) -> np.ndarray:
    return random.rand(ROWS, size, size, channels).astype("float32")


def rows(random: np.random.RandomState, features: int = 6) -> np.ndarray:
    return random.randn(ROWS, features).astype("float32")


def series(random: np.random.RandomState, length: int = 12, channels: int = 4) -> np.ndarray:
    return random.randn(ROWS, length, channels).astype("float32")


def tokens(random: np.random.RandomState, length: int = 12, vocabulary: int = 50) -> np.ndarray:
    """Whole numbers from 1 on; zeros at the ends of some rows."""
    ids = random.randint(1, vocabulary, (ROWS, length))
    ids[padding(random, length) == 0] = 0
    return ids.astype("int32")


def padding(random: np.random.RandomState, length: int = 12) -> np.ndarray:
    """Ones, and zeros at the ends of some rows."""
    return (np.arange(length) < random.randint(length // 2, length + 1, (ROWS, 1))).astype("int32")


def pooled(outputs: Any, units: int = CLASSES) -> Any:
    """Logits of classes: the means over all axes between the first and the last, through a dense layer."""
    import keras

    pools = {3: keras.layers.GlobalAveragePooling1D, 4: keras.layers.GlobalAveragePooling2D,
             5: keras.layers.GlobalAveragePooling3D}  # fmt: skip
    parts = [pools[len(part.shape)]()(part) if len(part.shape) > 2 else part for part in keras.tree.flatten(outputs)]
    return keras.layers.Dense(units, name="classes")(parts[0] if len(parts) == 1 else keras.layers.Concatenate()(parts))
