"""The built-in models against the tables of the works that they are from, line by line."""

import keras
import numpy as np
import pytest

from kerasdp.models import build_model

# A line: layer, kernel, stride, filters or units, shape of its output, weights and biases.


# d2l.ai, "Multi-GPU training from scratch": images of 28x28.
LENET = """
    conv1                      3x3  /1  20    26x26x20    200
    conv2                      5x5  /1  50    9x9x50      25050
    dense1                     -    -   128   128         102528
    logits                     -    -   10    10          1290
"""

# Keras' guide "Multi-GPU distributed training with PyTorch": images of 28x28; the first two convolutions have no bias.
CONVNET = """
    conv1                      3x3  /1  12    28x28x12    108
    conv2                      6x6  /2  24    12x12x24    10368
    conv3                      6x6  /2  32    6x6x32      27680
    dense1                     -    -   256   256         8448
    logits                     -    -   10    10          2570
"""

TABLES = {"lenet": LENET, "convnet": CONVNET}


@pytest.fixture(scope="module")
def models():
    found = {name: build_model(name, (28, 28, 1), 10) for name in (*TABLES, "resnet18")}
    return found | {"resnet50": build_model("resnet50", (128, 128, 3), 1000)}


def line_of(layer):
    """What a table says of a layer with a kernel."""
    is_conv = isinstance(layer, keras.layers.Conv2D)
    kernel = "x".join(map(str, layer.kernel_size)) if is_conv else "-"
    strides = f"/{layer.strides[0]}" if is_conv else "-"
    if is_conv:
        assert layer.strides[0] == layer.strides[1] and layer.dilation_rate == (1, 1) and layer.groups == 1
    shape = "x".join(map(str, layer.output.shape[1:]))
    size = layer.filters if is_conv else layer.units
    return [layer.name, kernel, strides, str(size), shape, str(layer.count_params())]


@pytest.mark.parametrize("name", TABLES)
def test_layers_with_kernels(name, models):
    kinds = keras.layers.Conv2D, keras.layers.Dense
    found = [line_of(each) for each in models[name].layers if isinstance(each, kinds)]
    expected = [line.split() for line in TABLES[name].strip().splitlines()]
    assert found == expected


def before(layer):
    """The layers whose outputs a layer gets."""
    inputs = layer.input if isinstance(layer.input, list) else [layer.input]
    return [each._keras_history.operation for each in inputs]


def after(model, layer):
    return [each for each in model.layers if not isinstance(each, keras.layers.InputLayer) and layer in before(each)]


def follow(model, layer):
    """Kinds of what comes after a layer, its own ReLU included, up to the next one with a kernel, a sum or a branch."""
    kinds = [layer.activation.__name__] if layer.activation is not keras.activations.linear else []
    while len(following := after(model, layer)) == 1:
        (layer,) = following
        kinds.append(type(layer).__name__)
        if hasattr(layer, "kernel") or isinstance(layer, keras.layers.Add):
            break
    return kinds


NORM, POOL = "BatchNormalization", "GlobalAveragePooling2D"


# Blocks of each stage, and their filters; what follows the stem, and the layer before the first block; the convolutions
# of a block, the last norm, the shortcut where it is convolved, and the last ReLU.
BLOCKS = {
    "resnet18": (
        (2, 2, 2, 2), (64, 128, 256, 512), [NORM, "ReLU"], "stem_relu",
        ("conv1", "conv2"), "norm2", "shortcut", "relu2",
    ),
    "resnet50": (
        (3, 4, 6, 3), (256, 512, 1024, 2048), [NORM, "ReLU", "ZeroPadding2D", "MaxPooling2D"], "stem_pool",
        ("1_conv", "2_conv", "3_conv"), "3_norm", "shortcut_norm", "relu3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_resnets(name, models):
    """Convolutions, each with BN, all but the last with ReLU; plus the shortcut, convolved where sizes change; ReLU."""
    counts, widths, stem, last, convs, norm, shortcut, relu = BLOCKS[name]
    model = models[name]
    assert follow(model, model.get_layer("stem_conv"))[: len(stem)] == stem
    for stage, (count, width) in enumerate(zip(counts, widths, strict=True), 1):
        for number in range(1, count + 1):
            block = f"stage{stage}_block{number}"
            layers = [model.get_layer(f"{block}_{each}") for each in convs]
            for layer in layers[:-1]:
                assert [kind for kind in follow(model, layer) if kind != "ZeroPadding2D"] == [NORM, "ReLU", "Conv2D"]
            assert follow(model, layers[-1]) == [NORM, "Add"]
            (source,) = before(layers[0])
            assert (before(source)[0] if isinstance(source, keras.layers.ZeroPadding2D) else source).name == last
            is_convolved = number == 1 and (stage > 1 or name == "resnet50")
            add = model.get_layer(f"{block}_add")
            ends = [f"{block}_{norm}", f"{block}_{shortcut}" if is_convolved else last]
            assert [each.name for each in before(add)] == ends
            last = f"{block}_{relu}"
            assert before(model.get_layer(last)) == [add] and add.output.shape[-1] == width
    assert [type(each).__name__ for each in after(model, model.get_layer(last))] == [POOL]


# Numbers that are trained; the sizes of kernels, by what their names end with (of the stem it is empty), where it is
# another one than that of most; the convolutions of a stage's first block that have a stride.
KERNELS = {
    # d2l.ai 13.6: a bias in each convolution.
    "resnet18": (11_175_818, 3, {"shortcut": 1}, ("conv1", "shortcut")),
    # He et al. 2016, table 1; the strides are in the 3x3 convolutions, as in the published weights of today.
    "resnet50": (25_557_032, 1, {"": 7, "2_conv": 3}, ("2_conv", "shortcut_conv")),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_resnets(name, models):
    size, usual, others, with_stride = KERNELS[name]
    assert sum(int(np.prod(each.shape)) for each in models[name].trainable_weights) == size
    kernels = {layer.name: layer for layer in models[name].layers if isinstance(layer, keras.layers.Conv2D)}
    assert len(kernels) == {"resnet18": 1 + 2 * 8 + 3, "resnet50": 1 + 3 * 16 + 4}[name]
    for each, layer in kernels.items():
        stage, _, place = each.partition("_block")
        number, _, kind = place.partition("_")  # of the stem both are empty
        width = others.get(kind, usual)
        is_narrower = stage != "stage1" and number == "1" and kind in with_stride
        stride = 2 if is_narrower or each == "stem_conv" and name == "resnet50" else 1
        assert (layer.kernel_size, layer.strides, layer.groups) == ((width, width), (stride, stride), 1), each


# Of each work: momentum and epsilon of its batch norms, in Keras' terms; initializers of kernels. Biases begin with 0.
# The Keras guide leaves all to Keras. d2l.ai and torchvision have PyTorch's batch norm, momentum 0.1 there. He et al.
# have He normal; d2l.ai has N(0, 0.01), which its flagfiles ask for.
NUMBERS = {
    "lenet": (None, "GlorotUniform"),
    "convnet": ((0.99, 1e-3), "GlorotUniform"),
    "resnet18": ((0.9, 1e-5), "GlorotUniform"),
    "resnet50": ((0.9, 1e-5), "HeNormal"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_no_shape_tells(name, models):
    norms, kernels = set(), set()
    for layer in models[name].layers:
        begin = {"bias": 0.0, "beta": 0.0, "gamma": 1.0, "moving_mean": 0.0, "moving_variance": 1.0}
        for weight in layer.weights:
            if weight.name in begin:
                assert set(np.unique(weight.numpy())) == {begin[weight.name]}, weight.path
        if isinstance(layer, keras.layers.BatchNormalization):
            norms.add((layer.momentum, layer.epsilon))
        if hasattr(layer, "kernel_initializer"):
            kernels.add(type(layer.kernel_initializer).__name__)
    expected, kernel = NUMBERS[name]
    assert norms == ({expected} if expected else set()) and kernels == {kernel}
