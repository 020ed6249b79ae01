"""Defines the built-in image models, loads backbones of keras.applications, and makes optimizers by name.

The built-in models are plain Keras models, from the smallest to the largest. The functions have these arguments:
`input_shape` is `(height, width, channels)`. `num_classes` is the number of logits. `kernel_initializer` initializes
all kernels; None means Glorot uniform. A model takes images with values from 0 to 255, shape `(batch, height, width,
channels)`. It returns logits, shape `(batch, num_classes)`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import layers

from kerasdp.config import choices
from kerasdp.data.datasets import one_download_at_a_time
from kerasdp.errors import UserError


def build_model(
    name: str, input_shape: tuple[int, ...], num_classes: int, builders: Sequence[Callable[..., Any]] | None = None
) -> keras.Model:
    """Builds a built-in or user-defined model by name.

    Args:
        name: a built-in model, such as `"lenet"` or `"lenet(activation='relu')"`; or a user-defined function, such as
            `"my_model.py:build"`, which is called as `build(input_shape=..., num_classes=...)`.
        input_shape: shape of one input, without the batch axis.
        num_classes: number of logits.
        builders: functions that build the built-in models. None: `mlp`, `lenet`, `convnet`, `resnet18` and `resnet50`.

    Returns:
        A `keras.Model`, not compiled, whose outputs are logits of shape `(batch, num_classes)`. The built-in models
        scale images with values from 0 to 255. `"mlp"` also takes vectors, which it does not scale.

    Raises:
        UserError: if there is no model of this name; if the user-defined function does not take these arguments, or
            does not return a Keras model.

    Example:
        ```python
        import keras
        import kerasdp

        model = kerasdp.build_model("mlp", input_shape=(28, 28, 1), num_classes=10)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        print(model.output_shape)  # (None, 10)
        ```
    """
    name, arguments = choices.parse(name, "model")
    is_own = ":" in name
    known: dict[str, Any] = {each.__name__: each for each in builders or (mlp, lenet, convnet, resnet18, resnet50)}
    if not is_own and name not in known:
        raise UserError(f"--model: expected one of {', '.join(known)}, or file.py:function. Received: {name!r}")
    builder = choices.load_user_function(name, "model") if is_own else known[name]
    if not is_own and isinstance(text := arguments.get("kernel_initializer"), str):
        arguments["kernel_initializer"] = _initializer(text)
    given = {"input_shape": input_shape, "num_classes": num_classes}
    try:
        inspect.signature(builder).bind(**arguments, **given)
    except TypeError as error:
        raise UserError(f"--model: {name} cannot be called with {', '.join(arguments | given)} ({error})") from error
    try:
        model = builder(**arguments, **given)
    except (TypeError, ValueError) as error:
        if is_own:  # with all its frames: the user-defined function may be at fault
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"--model: {name} cannot be built for inputs of shape {input_shape}: {reason}") from error
    if not isinstance(model, keras.Model):
        raise UserError(f"--model: expected {name} to return a Keras model. Received: {type(model).__name__}")
    return model


def make_optimizer(name: str, learning_rate: Any = None) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer by its name.

    Args:
        name: a name with or without arguments, such as `"adam"` or `"sgd(momentum=0.9)"`.
        learning_rate: a number or a Keras schedule. None: the learning rate in `name`, or the optimizer's default.

    Returns:
        A Keras optimizer.

    Raises:
        UserError: if Keras has no optimizer of this name, or the optimizer does not take these arguments.

    Example:
        ```python
        import keras
        import kerasdp

        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(kerasdp.make_optimizer("adam(beta_1=0.8)", learning_rate=0.01), "mse")
        print(model.optimizer.beta_1)  # 0.8
        ```
    """
    name, arguments = choices.parse(name, "optimizer")
    base = keras.optimizers.Optimizer
    known: dict[str, Any] = {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    if name.lower() not in known:
        raise UserError(f"--optimizer: expected one of {', '.join(known)}. Received: {name!r}")
    if learning_rate is not None:
        arguments["learning_rate"] = learning_rate
    try:
        return known[name.lower()](**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer: {name} does not take these arguments: {str(error).splitlines()[0]}") from error


def _initializer(text: str) -> Any:
    name, arguments = choices.parse(text, "model")
    # Not the initializer: one that several layers share draws the same values for each.
    return {"class_name": name, "config": arguments} if arguments else name


# As in both published ResNets (PyTorch's momentum of 0.1 is Keras' 0.9). With Keras' default of 0.99, the moving
# averages lag after an epoch of some hundred steps, and the measured accuracy is too low.
_NORM = {"momentum": 0.9, "epsilon": 1e-5}


def mlp(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds a model with one hidden layer of 10 units, like the toy model in PyTorch's tutorial on model parallelism.

    `input_shape` may also be `(features,)`. Features are not scaled. The tutorial has 10 features and 5 outputs.
    """
    kernels = {"kernel_initializer": kernel_initializer or "glorot_uniform"}
    if len(input_shape) == 1:
        inputs = x = keras.Input(input_shape, name="features")
    else:
        inputs, x = _image_input(input_shape)
        x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(10, activation="relu", name="dense1", **kernels)(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="mlp")


def lenet(
    input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None, activation: str = "tanh"
) -> keras.Model:
    """Builds LeNet: two convolutions with average pooling, then two dense layers.

    The model follows the d2l.ai chapter on multi-GPU training from scratch (after LeCun et al. 1998), for images of
    `(28, 28, 1)`. The chapter uses `activation="relu"`. ReLU amplifies round-off, because its gradient jumps from 0 to
    1 at 0.
    """
    kernels = {"kernel_initializer": kernel_initializer or "glorot_uniform"}
    inputs, x = _image_input(input_shape)
    x = layers.Conv2D(20, 3, activation=activation, name="conv1", **kernels)(x)
    x = layers.AveragePooling2D(2, name="pool1")(x)
    x = layers.Conv2D(50, 5, activation=activation, name="conv2", **kernels)(x)
    x = layers.AveragePooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(128, activation=activation, name="dense1", **kernels)(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="lenet")


def convnet(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds a model of three convolutions with batch norm, pooling, a dense layer and dropout.

    It follows the Keras guide "Multi-GPU distributed training with PyTorch" (keras.io, 2023), for images of `(28, 28,
    1)`.
    """
    kernels = {"kernel_initializer": kernel_initializer or "glorot_uniform"}
    inputs, x = _image_input(input_shape)
    # As in the guide: the second convolution does not pad, and the third one alone has a bias.
    for number, (filters, size, strides, padding, bias) in enumerate(
        [(12, 3, 1, "same", False), (24, 6, 2, "valid", False), (32, 6, 2, "same", True)], 1
    ):
        x = layers.Conv2D(
            filters, size, strides=strides, padding=padding, use_bias=bias, name=f"conv{number}", **kernels
        )(x)
        x = layers.BatchNormalization(scale=False, name=f"norm{number}")(x)
        x = layers.ReLU(name=f"relu{number}")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(256, activation="relu", name="dense1", **kernels)(x)
    x = layers.Dropout(0.5, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="convnet")


def resnet18(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds ResNet-18: a 3x3 stem without max-pooling, and four stages of two blocks with 64, 128, 256, 512 filters.

    It follows d2l.ai 13.6 (He et al. 2016, arXiv:1512.03385), for images of `(28, 28, 1)`. The book initializes kernels
    with `random_normal(stddev=0.01)`.
    """
    kernels = {"kernel_initializer": kernel_initializer or "glorot_uniform"}
    inputs, x = _image_input(input_shape)
    x = layers.Conv2D(64, 3, padding="same", name="stem_conv", **kernels)(x)
    x = layers.BatchNormalization(**_NORM, name="stem_norm")(x)
    x = layers.ReLU(name="stem_relu")(x)
    for stage, filters in enumerate((64, 128, 256, 512), 1):
        x = _basic_block(x, filters, strides=1 if stage == 1 else 2, name=f"stage{stage}_block1", kernels=kernels)
        x = _basic_block(x, filters, strides=1, name=f"stage{stage}_block2", kernels=kernels)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="resnet18")


def _basic_block(
    x: keras.KerasTensor, filters: int, *, strides: int, name: str, kernels: dict[str, Any]
) -> keras.KerasTensor:
    """Adds a residual block: conv-BN-ReLU-conv-BN, plus the shortcut, then ReLU.

    The convolutions have a bias. `strides=2` halves the height and the width.
    """
    shortcut = x
    if strides != 1:
        shortcut = layers.Conv2D(filters, 1, strides=strides, name=f"{name}_shortcut", **kernels)(x)
    x = _padded_conv(x, filters, strides, f"{name}_conv1", kernels)
    x = layers.BatchNormalization(**_NORM, name=f"{name}_norm1")(x)
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = _padded_conv(x, filters, 1, f"{name}_conv2", kernels)
    x = layers.BatchNormalization(**_NORM, name=f"{name}_norm2")(x)
    return layers.ReLU(name=f"{name}_relu2")(layers.Add(name=f"{name}_add")([x, shortcut]))


def _padded_conv(
    x: keras.KerasTensor, filters: int, strides: int, name: str, kernels: dict[str, Any]
) -> keras.KerasTensor:
    if strides == 1:
        return layers.Conv2D(filters, 3, padding="same", name=name, **kernels)(x)
    # "same" with a stride pads only right and below; the paper's network (and PyTorch's) pads one pixel all around.
    x = layers.ZeroPadding2D(1, name=f"{name}_pad")(x)
    return layers.Conv2D(filters, 3, strides=strides, name=name, **kernels)(x)


def resnet50(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds ResNet-50: a 7x7 stem with max-pooling, and four stages of 3, 4, 6 and 3 bottleneck blocks.

    It has 25.6 million parameters (He et al. 2016, arXiv:1512.03385). In a block with stride 2, the 3x3 convolution has
    the stride, as in torchvision. The paper uses images of `(224, 224, 3)` and 1000 classes. `kernel_initializer=None`
    means He normal, as in the paper.
    """
    kernels = {"kernel_initializer": kernel_initializer or "he_normal"}
    inputs, x = _image_input(input_shape)
    x = layers.ZeroPadding2D(3, name="stem_pad")(x)
    x = _conv_norm(x, 64, 7, strides=2, name="stem", kernels=kernels)
    x = layers.ReLU(name="stem_relu")(x)
    x = layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
    x = layers.MaxPooling2D(3, strides=2, name="stem_pool")(x)
    for stage, (filters, num_blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(1, num_blocks + 1):
            strides = 2 if block == 1 and stage > 1 else 1
            x = _bottleneck(x, filters, strides, block == 1, f"stage{stage}_block{block}", kernels)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="resnet50")


def _bottleneck(
    x: keras.KerasTensor, filters: int, strides: int, widen: bool, name: str, kernels: dict[str, Any]
) -> keras.KerasTensor:
    """Adds a bottleneck block: 1x1, 3x3 and 1x1 convolutions, plus the shortcut, then ReLU.

    The output has `4 * filters` channels. If `widen` is True, the shortcut has a convolution, too.
    """
    shortcut = _conv_norm(x, 4 * filters, 1, strides, f"{name}_shortcut", kernels) if widen else x
    x = layers.ReLU(name=f"{name}_relu1")(_conv_norm(x, filters, 1, 1, f"{name}_1", kernels))
    x = layers.ZeroPadding2D(1, name=f"{name}_pad")(x)
    x = layers.ReLU(name=f"{name}_relu2")(_conv_norm(x, filters, 3, strides, f"{name}_2", kernels))
    x = _conv_norm(x, 4 * filters, 1, 1, f"{name}_3", kernels)
    return layers.ReLU(name=f"{name}_relu3")(layers.Add(name=f"{name}_add")([x, shortcut]))


def _conv_norm(
    x: keras.KerasTensor, filters: int, size: int, strides: int, name: str, kernels: dict[str, Any]
) -> keras.KerasTensor:
    x = layers.Conv2D(filters, size, strides=strides, use_bias=False, name=f"{name}_conv", **kernels)(x)
    return layers.BatchNormalization(**_NORM, name=f"{name}_norm")(x)


def _image_input(input_shape: tuple[int, ...]) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns an input for images from 0 to 255, and the same images scaled to [0, 1].

    The scaling is part of the model. So images are sent to the device as uint8, and a saved model takes the same images
    as in training.

    Returns:
        A tuple: the input of the model, shape `(batch, *input_shape)`; the scaled images, to which layers are applied.
    """
    inputs = keras.Input(input_shape, name="image")
    return inputs, layers.Rescaling(1.0 / 255, name="rescaling")(inputs)


def load_backbone(name: str, weights: str, input_shape: tuple[int, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """Loads a model of `keras.applications` without its head, and the function that preprocesses its images.

    Args:
        name: name of a function of `keras.applications`, such as `"MobileNetV2"`.
        weights: `"imagenet"`: Keras downloads the weights. `"none"`: the weights are random. Any other value is the
            path of a `.weights.h5` file of the same model without its head.
        input_shape: `(height, width, 3)`.

    Returns:
        A tuple `(model, preprocess_input)`. The outputs of the model have shape `(samples, height, width, channels)`.
        `preprocess_input` takes images from 0 to 255.

    Raises:
        UserError: if Keras has no model of this name, or the weights cannot be loaded.

    Example:
        ```python
        import keras
        import kerasdp

        backbone, preprocess_input = kerasdp.load_backbone("MobileNet", weights="none", input_shape=(32, 32, 3))
        backbone.trainable = False
        inputs = keras.Input((32, 32, 3))
        features = backbone(preprocess_input(inputs), training=False)
        features = keras.layers.GlobalAveragePooling2D()(features)
        model = keras.Model(inputs, keras.layers.Dense(10)(features))
        ```
    """
    builder = getattr(keras.applications, name, None)
    if not inspect.isfunction(builder):
        known = [each for each, value in vars(keras.applications).items() if inspect.isfunction(value)]
        raise UserError(f"--backbone: expected one of {', '.join(sorted(known))}. Received: {name!r}")
    try:
        with one_download_at_a_time("models"):
            model = builder(include_top=False, weights=None if weights == "none" else weights, input_shape=input_shape)
    except Exception as error:  # Keras raises bare Exception for a failed download
        reason = " ".join(str(error).split())
        way = "; offline, use --weights=FILE.weights.h5 or --weights=none" if weights == "imagenet" else ""
        raise UserError(
            f"--backbone: {name} with --weights={weights} cannot be loaded for images of shape {input_shape} "
            f"({reason:.300}){way}"
        ) from error
    module = getattr(keras.applications, builder.__module__.rpartition(".")[2])
    return model, module.preprocess_input
