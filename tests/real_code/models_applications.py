"""Every family of keras.applications, without weights: its smallest member, or one with fewer blocks of the kind."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, Ready, case, classes, images

# Arguments of all of them.
COMMON = {"weights": None, "classes": CLASSES, "classifier_activation": None}


def register(name: str, build: Callable[..., Any], size: int = 32) -> None:
    @case("keras.applications", f"app {name}")
    def make(random: np.random.RandomState) -> Ready:
        model = build(input_shape=(size, size, 3), **COMMON)
        return Ready(model=model, x=images(random, size) * 255, y=classes(random))


def public(name: str, **choices: Any) -> Callable[..., Any]:
    def build(**common: Any) -> Any:
        import keras

        return getattr(keras.applications, name)(**choices, **common)

    return build


def smaller(module: str, function_name: str, *arguments: Any, **choices: Any) -> Callable[..., Any]:
    """The function behind the public ones, which takes the number of blocks."""

    def build(**common: Any) -> Any:
        import importlib

        function = getattr(importlib.import_module(f"keras.src.applications.{module}"), function_name)
        return function(*arguments, **choices, **common)

    return build


def residual(kind: str) -> Callable[..., Any]:
    """ResNet and ResNetV2 take a function that stacks their blocks."""

    def build(**common: Any) -> Any:
        from keras.src.applications import resnet

        stack = getattr(resnet, f"stack_residual_blocks_{kind}")

        def stacks(x: Any) -> Any:
            return stack(stack(x, 8, 2, stride1=1, name="conv2"), 16, 2, name="conv3")

        return resnet.ResNet(stacks, kind == "v2", True, name=f"resnet_{kind}", **common)

    return build


def efficient(module: str, function_name: str, **choices: Any) -> Callable[..., Any]:
    def build(**common: Any) -> Any:
        import importlib

        function = getattr(importlib.import_module(f"keras.src.applications.{module}"), function_name)
        return function(default_size=32, **choices, **common)

    return build


register("VGG16", public("VGG16"))
register("VGG19", public("VGG19"))
register("MobileNet", public("MobileNet", alpha=0.25))
register("MobileNetV2", public("MobileNetV2", alpha=0.35))
register("MobileNetV3Small", public("MobileNetV3Small", alpha=0.75, minimalistic=True))
register("MobileNetV3Large", public("MobileNetV3Large", alpha=0.75))
register("Xception", public("Xception"), 71)
register("InceptionV3", public("InceptionV3"), 75)
register("InceptionResNetV2", public("InceptionResNetV2"), 75)
register("NASNetMobile", smaller("nasnet", "NASNet", penultimate_filters=96, num_blocks=1, stem_block_filters=8,
                                 skip_reduction=False, default_size=32))  # fmt: skip
register("DenseNet", smaller("densenet", "DenseNet", [1, 2, 1, 1], name="densenet"))
register("ResNet", residual("v1"))
register("ResNetV2", residual("v2"))
register("EfficientNet", efficient("efficientnet", "EfficientNet", width_coefficient=0.25, depth_coefficient=0.25))
register("EfficientNetV2", efficient("efficientnet_v2", "EfficientNetV2", width_coefficient=0.25,
                                     depth_coefficient=0.25, name="efficientnetv2-b0"))  # fmt: skip
register("ConvNeXt", smaller("convnext", "ConvNeXt", depths=[1, 1, 1, 1], projection_dims=[8, 8, 16, 16],
                             drop_path_rate=0.1, default_size=32))  # fmt: skip
