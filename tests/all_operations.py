"""Calls all functions of `keras.ops`, and trains all layers of `keras.layers`, on each backend, and says what differs.

    python tests/all_operations.py                                  # all of them, in float64, as Keras has them
    python tests/all_operations.py --backends=torch,jax softmax GRU
    python tests/all_operations.py --with_kerasdp                   # as kerasdp trains them

Outputs and gradients of each function are compared, and two steps of training of each layer, by what
`kerasdp.parity.bisect` does with a model. A function or layer of the installed Keras that has no case here is named.
Prints a line for each that differs; exit code 1 if any does.
"""

import argparse
import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kerasdp import parity
from kerasdp.keras_compat.operations import Array, Call
from kerasdp.parity.bisect import (
    Steps,
    _apart,
    _findings,
    _of_operation,
    _outputs_and_gradients,
    _some,
    _train,
)
from kerasdp.parity.divergence import tolerance_for
from kerasdp.parity.trace import call_in

BACKENDS = ("torch", "jax", "tensorflow")
EXACT = tolerance_for("float64", "SGD")


def numbers(*shape: int) -> np.ndarray:
    """Returns normal numbers, other ones for each shape."""
    return np.random.default_rng(shape).normal(size=shape)


X, Y, P, U = numbers(3, 4), numbers(4, 3).T, np.abs(numbers(3, 4)) + 0.2, np.tanh(numbers(3, 4)) * 0.9
V, W = numbers(5), numbers(6)[:5]
# Zeros of both signs, ties and halves.
EDGES = np.array([-2.5, -2.0, -1.0, -0.5, -0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0])
WHOLE, OTHER = np.array([5, 0, -3, 7, 2], "int32"), np.array([2, 3, 4, 1, 2], "int32")
SQUARE = numbers(4, 4)
POSITIVE = SQUARE @ SQUARE.T + 4 * np.eye(4)
IMAGE, KERNEL = numbers(2, 7, 8, 3), numbers(3, 3, 3, 4)
HOLES = np.where(X > 1, np.nan, X)
PARTS = (numbers(3, 4), numbers(3, 4)[::-1].copy())
ROWS = np.array([0, 0, 1, 3, 3], "int32")
LOGITS, CHOSEN, SHARES = numbers(5, 4), np.array([0, 3, 1, 2, 2], "int32"), np.eye(4)[[0, 3, 1, 2, 2]]
HEADS = numbers(2, 5, 3, 4)
COMPLEX = numbers(3, 4) + 1j * numbers(4, 3).T


def _cases() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yields names of functions and arguments."""
    from keras import ops

    def each(names: str, *args: Any, **kwargs: Any) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        for name in names.split():
            yield name, args, kwargs

    real = (
        "abs absolute arcsinh arctan cbrt ceil copy cos cosh deg2rad erf erfc exp exp2 expm1 fabs floor negative "
        "rad2deg relu relu6 round sigmoid sign signbit sin sinc sinh square swish silu selu softplus softsign "
        "tan tanh tanh_shrink trunc celu elu gelu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu "
        "log_sigmoid soft_shrink sparse_plus sparse_sigmoid squareplus i0 isfinite isinf isnan isneginf isposinf "
        "isreal logical_not nan_to_num ones_like zeros_like conj conjugate real imag angle stop_gradient array "
        "max min amax amin argmax argmin all any sum mean prod std var median ptp sort argsort count_nonzero cumsum "
        "cumprod nanargmax nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar "
        "softmax log_softmax logsumexp sparsemax normalize diff unique nonzero size ndim shape "
        "diag diagflat ravel flip"
    )
    yield from each(real, X.ravel())
    yield from each(real, EDGES)
    yield from each(
        "max min amax amin argmax argmin all any sum mean prod std var median ptp sort argsort cumsum cumprod nanmax "
        "nanmean nanmin nansum nanstd nanvar nanprod nanmedian nancumsum softmax log_softmax logsumexp sparsemax flip "
        "layer_normalization rms_normalization normalize diff",
        X, axis=-1,
    )  # fmt: skip
    yield from each("nanmax nanmean nanmin nansum nanstd nanvar nanprod nanmedian nancumsum nancumprod", HOLES, axis=1)
    yield from each("arccos arcsin arctanh erfinv", U)
    yield from each("log log10 log1p log2 rsqrt sqrt reciprocal", P)
    yield from each("arccosh", P + 1)
    yield from each("log1p", np.array([1e-9, 1e-4, 0.0]))
    yield from each("expm1", np.array([1e-9, 1e-4, 0.0]))
    two = (
        "add arctan2 divide divide_no_nan equal floor_divide fmax fmin fmod greater greater_equal heaviside hypot "
        "isclose allclose less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum minimum mod "
        "multiply nextafter not_equal subtract true_divide append"
    )
    yield from each(two, X, Y)
    yield from each(
        "maximum minimum fmax fmin greater less equal subtract heaviside arctan2 hypot append", EDGES, EDGES
    )
    yield from each("divide_no_nan", EDGES, np.zeros(12))
    yield from each(
        "add subtract multiply divide true_divide floor_divide mod fmod power maximum arctan2 hypot", WHOLE, OTHER
    )
    yield from each("power", P, X)
    yield from each("power", EDGES, 2.0)
    yield from each("power", EDGES, 3)
    whole = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift left_shift right_shift gcd lcm"
    yield from each(whole, np.abs(WHOLE), OTHER)
    yield from each("bitwise_invert bitwise_not", WHOLE)
    yield from each(
        "sum mean prod cumsum cumprod max argmax std var median sqrt exp sign abs square sort unique", WHOLE
    )
    yield from each("sum mean any all cumsum logical_not", np.array([True, False, True, True]))
    yield from each("ldexp", X, WHOLE[:4])
    yield from each("dot matmul", X, Y.T)
    yield from each("inner vdot kron outer", X, Y)
    yield from each("tensordot", X, Y.T, axes=1)
    yield from each("einsum", "ab,cb->ac", X, Y)
    yield from each("einsum", "...ab,...cb->...ac", numbers(2, 3, 4), numbers(2, 5, 4))
    yield from each("cross", numbers(5, 3), numbers(3, 5).T)
    yield from each("correlate", V, W[:3], mode="full")
    yield from each("corrcoef", X)
    yield from each("cdist", numbers(5, 3), numbers(4, 3))
    yield from each("average", X, axis=1, weights=P[0])
    yield from each("arange", 2, 11, 3)
    yield from each("linspace", 0.0, 2.0, num=7)
    yield from each("geomspace", 1.0, 100.0, num=5)
    yield from each("logspace", 0.0, 2.0, num=5)
    yield from each("ones zeros", (2, 3))
    yield from each("eye identity", 3)
    yield from each("tri", 4, k=1)
    yield from each("full", (2, 3), 1.5)
    yield from each("full_like", X, 1.5)
    yield from each("bartlett blackman hamming hanning", 7)
    yield from each("kaiser", 7, 8.0)
    yield from each("broadcast_to", V, (3, 5))
    yield from each("array_split split", numbers(6, 4), 3)
    yield from each("hsplit dsplit vsplit", numbers(4, 4, 4), 2)
    yield from each("concatenate stack hstack vstack dstack", list(PARTS))
    yield from each("meshgrid", V, W)
    yield from each("clip", EDGES, -1.0, 1.0)
    yield from each("threshold", EDGES, 0.5, -1.0)
    yield from each("bincount", np.abs(WHOLE), weights=V)
    yield from each("digitize", X, np.array([-1.0, 0.0, 1.0]))
    yield from each("searchsorted", np.sort(V), X.ravel())
    yield from each("histogram", X.ravel(), bins=4)
    yield from each("isin", WHOLE, OTHER)
    yield from each("diagonal trace", SQUARE, offset=1)
    yield from each("expand_dims", X, 1)
    yield from each("squeeze", X[:, None], axis=1)
    yield from each("fliplr flipud rot90 transpose tril triu", X)
    yield from each("moveaxis swapaxes", numbers(2, 3, 4), 0, 2)
    yield from each("reshape", X, (2, 6))
    yield from each("rearrange", numbers(2, 3, 4), "a b c -> (b a) c")
    yield from each("repeat", X, 2, axis=0)
    yield from each("tile", X, (2, 1))
    yield from each("roll", X, 2, axis=1)
    yield from each("pad", X, 2)
    yield from each("pad", X, 1, mode="symmetric")
    for mode in ("constant", "reflect", "symmetric"):
        yield from each("pad", X, ((1, 1), (2, 0)), mode=mode)
    for q in (0.3, np.array([0.0, 0.5, 0.9])):
        for method in ("linear", "lower", "higher", "nearest", "midpoint"):
            yield from each("quantile", X, q, axis=1, method=method)
            yield from each("percentile", X, q * 100, axis=1, method=method)
    yield from each("nanquantile", HOLES, 0.4, axis=1)
    yield from each("nanpercentile", HOLES, 40.0, axis=1)
    yield from each("select", [EDGES > 0, EDGES > -1], [EDGES, 2 * EDGES], default=3.0)
    yield from each("where", EDGES > 0, EDGES, -EDGES)
    yield from each("get_item", X, (slice(None), 1))
    yield from each("slice", X, (1, 1), (2, 2))
    yield from each("slice_update", X, (1, 1), numbers(2, 2))
    yield from each("scatter", ROWS[:, None], numbers(5, 2), (6, 2))
    for reduction in (None, "add", "max", "min", "mul"):
        yield from each("scatter_update", numbers(6, 2), np.array([[0], [2], [5]]), numbers(3, 2), reduction=reduction)
    yield from each("scatter_update", numbers(6, 2), ROWS[:, None], numbers(5, 2), reduction="add")
    yield from each("take", X, np.array([[0, 2], [1, -1]]), axis=1)
    yield from each("take_along_axis", X, np.array([[0, 2], [1, -1], [3, 3]]), axis=1)
    yield from each("trapezoid", X, dx=0.5)
    yield from each("vander", V)
    yield from each("unravel_index", np.abs(WHOLE), (3, 4))
    yield from each("view", X, dtype="int64")
    yield from each("argpartition", X, 2)
    yield from each("top_k", X, 2)
    yield from each("top_k", EDGES, 3)
    yield from each("in_top_k", CHOSEN, LOGITS, k=2)
    yield from each("segment_sum segment_max segment_min segment_prod", numbers(5, 2), ROWS, num_segments=5)
    yield from each("cholesky cholesky_inverse logdet slogdet", POSITIVE)
    yield from each("det inv lu_factor matrix_rank pinv qr", SQUARE)
    yield from each("eigh", POSITIVE)
    yield from each("eig", POSITIVE)
    yield from each("svd", SQUARE, compute_uv=False)
    yield from each("norm", X)
    for order in (1, 2, np.inf, "fro", "nuc"):
        yield from each("norm", X, ord=order)
    yield from each("norm", np.zeros(3))
    yield from each("norm", EDGES, ord=1)
    yield from each("solve lstsq", SQUARE, numbers(4, 2))
    yield from each("solve_triangular", np.triu(SQUARE) + 3 * np.eye(4), numbers(4, 2))
    pair = (numbers(3, 8), numbers(8, 3).T)
    yield from each("fft", pair)
    yield from each("fft2 ifft2", (numbers(4, 4), SQUARE.T))
    yield from each("rfft", numbers(3, 8))
    yield from each("irfft", (numbers(3, 5), numbers(5, 3).T))
    yield from each("stft", numbers(2, 32), 8, 4, 8)
    yield from each("istft", (numbers(2, 7, 5), numbers(2, 5, 7).swapaxes(1, 2)), 8, 4, 8)
    yield from each("extract_sequences", numbers(2, 16), 4, 2)
    yield from each("view_as_complex", numbers(3, 4, 2))
    yield from each("view_as_real conj real imag angle abs", COMPLEX)
    yield from each("polar", P, X)
    for padding in ("valid", "same"):
        yield from each("conv", IMAGE, KERNEL, strides=2, padding=padding)
        yield from each("conv", IMAGE, KERNEL, padding=padding, dilation_rate=2)
        yield from each("conv_transpose", IMAGE, numbers(3, 3, 4, 3), strides=2, padding=padding)
        yield from each("depthwise_conv", IMAGE, numbers(3, 3, 3, 2), strides=2, padding=padding)
        yield from each("separable_conv", IMAGE, numbers(3, 3, 3, 2), numbers(1, 1, 6, 4), padding=padding)
        yield from each("max_pool average_pool", IMAGE, 3, strides=2, padding=padding)
        yield from each("max_pool", np.zeros((1, 5, 5, 1)), 3, strides=2, padding=padding)
    yield from each("adaptive_average_pool adaptive_max_pool", IMAGE, (3, 4))
    yield from each("batch_normalization", X, V[:4], P[0], axis=-1, offset=W[:4], scale=Y[0])
    yield from each("moments", IMAGE, axes=(0, 1, 2))
    yield from each("layer_normalization", X, V[:4], W[:4])
    yield from each("rms_normalization", X, V[:4])
    yield from each("normalize", np.zeros((2, 3)))
    yield from each("depth_to_space", numbers(1, 2, 2, 8), 2)
    yield from each("space_to_depth", numbers(1, 4, 4, 2), 2)
    yield from each("unfold", numbers(1, 2, 5, 5), 3)
    yield from each("fold", numbers(1, 18, 9), (5, 5), 3)
    yield from each("glu", X)
    yield from each("gelu", EDGES, approximate=False)
    yield from each("one_hot", CHOSEN, 4)
    yield from each("one_hot", np.array([-1, 4, 1]), 4)
    yield from each("multi_hot", np.array([[0, 2], [1, 1]]), 4)
    yield from each("psnr", np.abs(U), P, 2.0)
    for from_logits in (True, False):
        given = LOGITS if from_logits else np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
        yield from each("categorical_crossentropy", SHARES, given, from_logits=from_logits)
        yield from each("sparse_categorical_crossentropy", CHOSEN, given, from_logits=from_logits)
        yield from each("binary_crossentropy", SHARES, given, from_logits=from_logits)
    yield from each("binary_crossentropy", SHARES, SHARES)
    yield from each("categorical_crossentropy", SHARES, SHARES)
    yield from each("dot_product_attention", HEADS, HEADS[::-1].copy(), HEADS * 0.5)
    yield from each("dot_product_attention", HEADS, HEADS[::-1].copy(), HEADS * 0.5, is_causal=True)
    targets, lengths = np.array([[1, 2, 0], [2, 3, 1]], "int32"), np.array([2, 3], "int32")
    yield from each("ctc_loss", targets, numbers(2, 8, 4), lengths, np.array([8, 7], "int32"))
    yield from each("ctc_decode", numbers(2, 8, 4), np.array([8, 7], "int32"))
    yield from each("cast saturate_cast", X, "float32")
    yield from each("saturate_cast", 300 * X, "uint8")
    yield from each("cast", X, "int32")
    yield from each("unstack", X)
    yield from each("empty_like", np.zeros((0, 3)))
    yield from each("empty", (0, 3))
    yield from each("map vectorized_map", lambda row: ops.sum(row * row), X)
    yield from each("scan", lambda carry, row: (carry * 0.5 + row, carry * row), V[:4], X)
    yield from each("associative_scan", lambda one, other: one * other, X)
    yield from each("cond", True, lambda: ops.ones(2), lambda: ops.zeros(2))
    yield from each("switch", 1, [lambda x: x, lambda x: x * x], X)
    yield from each("fori_loop", 0, 3, lambda number, x: x * 1.5 + number, X)
    yield from each("while_loop", lambda x: ops.sum(x) < 50, lambda x: (x + 1.0,), (P,))
    yield from each("jvp", lambda x: ops.tanh(x), (X,), (Y,))


# Not called: they compute nothing, or take and give no numbers.
_NO_OPERATIONS = frozenset(
    ["convert_to_numpy", "convert_to_tensor", "custom_gradient", "dtype", "is_tensor", "vectorize"]
)


def _layers() -> Iterator[tuple[str, Callable[[], Any], tuple[np.ndarray, ...]]]:
    """Yields names of layers, what builds one, and its inputs; several are given as a list."""
    from keras import layers as kl

    line, image, cube = numbers(4, 9, 3), numbers(4, 8, 9, 3), numbers(4, 5, 6, 7, 2)
    by_rank = {1: line, 2: image, 3: cube}

    def each(names: str, *inputs: np.ndarray, **options: Any) -> Iterator[tuple[str, Any, tuple[np.ndarray, ...]]]:
        for name in names.split():
            yield name, lambda name=name: getattr(kl, name)(**options), inputs

    for rank, array in by_rank.items():
        for padding in ("valid", "same"):
            yield from each(f"Conv{rank}D Conv{rank}DTranspose", array, filters=4, kernel_size=3, padding=padding)
            yield from each(
                f"Conv{rank}D Conv{rank}DTranspose", array, filters=4, kernel_size=3, strides=2, padding=padding
            )
            yield from each(f"MaxPooling{rank}D AveragePooling{rank}D", array, pool_size=3, strides=2, padding=padding)
            if rank < 3:
                yield from each(f"DepthwiseConv{rank}D", array, kernel_size=3, strides=2, padding=padding)
                yield from each(f"SeparableConv{rank}D", array, filters=4, kernel_size=3, padding=padding)
        yield from each(f"GlobalAveragePooling{rank}D GlobalMaxPooling{rank}D", array)
        yield from each(f"AdaptiveAveragePooling{rank}D AdaptiveMaxPooling{rank}D", array, output_size=3)
        yield from each(f"Cropping{rank}D ZeroPadding{rank}D UpSampling{rank}D", array)
        yield from each(f"SpatialDropout{rank}D", array, rate=0.4)
        steps = numbers(3, 4, *array.shape[1:])
        yield from each(f"ConvLSTM{rank}D", steps[:, :3], filters=2, kernel_size=3)
    yield from each("UpSampling2D", image, interpolation="bilinear")
    yield from each("Dense", X, units=5, activation="gelu")
    yield from each("EinsumDense", line, equation="abc,cd->abd", output_shape=(9, 5), bias_axes="d")
    yield from each("Embedding", np.abs(WHOLE)[:, None], input_dim=9, output_dim=4)
    yield from each("ReversibleEmbedding", np.abs(WHOLE)[:, None], input_dim=9, output_dim=4)
    yield from each("ELU LeakyReLU PReLU ReLU Softmax Identity Flatten UnitNormalization LayerNormalization", line)
    yield from each("RMSNormalization BatchNormalization Normalization", line)
    yield from each("GroupNormalization", line, groups=3)
    yield from each("Activation", line, activation="mish")
    yield from each("Add Average Concatenate Maximum Minimum Multiply Subtract", X, Y)
    yield from each("Subtract Maximum", X, X)
    yield from each("Dot", X, Y, axes=1)
    yield from each("Attention AdditiveAttention", line, line[::-1].copy())
    yield from each("MultiHeadAttention", line, line[::-1].copy(), num_heads=2, key_dim=3)
    yield from each(
        "GroupQueryAttention", line, line[::-1].copy(), line, head_dim=3, num_query_heads=4, num_key_value_heads=2
    )
    yield from each("LSTM GRU SimpleRNN", line, units=4, return_sequences=True)
    yield from each("LSTM GRU SimpleRNN", line, units=4, dropout=0.3, recurrent_dropout=0.2, go_backwards=True)
    yield from each("GRU", line, units=4, reset_after=False)
    yield "Bidirectional", lambda: kl.Bidirectional(kl.GRU(3)), (line,)
    yield "TimeDistributed", lambda: kl.TimeDistributed(kl.Dense(3)), (line,)
    yield "RNN", lambda: kl.RNN([kl.LSTMCell(3), kl.GRUCell(4), kl.SimpleRNNCell(2)]), (line,)
    yield "StackedRNNCells", lambda: kl.RNN(kl.StackedRNNCells([kl.LSTMCell(3), kl.LSTMCell(4)])), (line,)
    yield "Masking", lambda: _sequence(kl.Masking(), kl.LSTM(4)), (np.where(numbers(4, 9, 1) > 0.5, 0.0, line),)
    yield "Embedding", lambda: _sequence(kl.Embedding(9, 4, mask_zero=True), kl.GRU(4)), (np.abs(WHOLE.reshape(1, 5)),)
    yield "SpectralNormalization", lambda: kl.SpectralNormalization(kl.Dense(5)), (X,)
    yield "Lambda", lambda: kl.Lambda(lambda x: x * x), (X,)
    yield from each("ActivityRegularization", X, l1=0.1, l2=0.1)
    yield from each("AlphaDropout Dropout GaussianDropout", line, rate=0.4)
    yield from each("GaussianNoise", line, stddev=0.3)
    yield from each("Permute", line, dims=(2, 1))
    yield from each("RepeatVector", X, n=3)
    yield from each("Reshape", line, target_shape=(27,))
    yield from each("Rescaling", line, scale=0.5, offset=1.0)
    yield from each("Resizing", image, height=5, width=13)
    yield from each("Resizing", image, height=5, width=13, interpolation="nearest")
    yield from each("Resizing", image, height=5, width=13, interpolation="bicubic")
    yield from each("CenterCrop RandomCrop", image, height=5, width=5)
    yield from each("CategoryEncoding", np.abs(WHOLE)[:, None], num_tokens=9)
    yield from each("Discretization", X, bin_boundaries=[-1.0, 0.0, 1.0])
    yield from each("MelSpectrogram", numbers(2, 512), sequence_length=64, fft_length=64, num_mel_bins=8)
    yield from each("STFTSpectrogram", numbers(2, 256, 1), frame_length=64, frame_step=32, fft_length=64)
    photo = np.abs(numbers(4, 8, 9, 3)).clip(0, 2) * 127
    ranged = "RandomBrightness RandomHue RandomSaturation RandomColorDegeneration RandomSharpness RandomContrast"
    yield from each(ranged, photo, factor=0.4, seed=1)
    yield from each("RandomFlip", photo, seed=1)
    yield from each("RandomInvert RandomGrayscale", photo, factor=0.5, seed=1)
    yield "RandomRotation", lambda: kl.RandomRotation(0.2, seed=1), (photo,)
    yield "RandomZoom", lambda: kl.RandomZoom(0.2, seed=1), (photo,)
    yield from each("RandomTranslation", photo, height_factor=0.2, width_factor=0.2, seed=1)
    yield from each("RandomShear", photo, x_factor=0.3, y_factor=0.2, seed=1)
    yield from each("RandomPerspective RandomErasing RandomGaussianBlur RandomElasticTransform", photo, seed=1)
    yield from each("RandomPosterization", photo, factor=4, seed=1)
    yield from each("RandomColorJitter", photo, value_range=(0, 255), brightness_factor=0.3, seed=1)
    yield from each("AutoContrast Equalization AugMix RandAugment MixUp CutMix", photo)
    yield from each("Solarization", photo, addition_factor=0.3, seed=1)
    yield from each("ContrastLimitedAdaptiveHistogramEqualization", photo)
    yield "Pipeline", lambda: kl.Pipeline([kl.Rescaling(0.5), kl.CenterCrop(4, 4)]), (photo,)


# No layers by themselves, or of one framework, or of text.
_NO_LAYERS = frozenset(
    [
        "FlaxLayer",
        "GRUCell",
        "HashedCrossing",
        "Hashing",
        "InputLayer",
        "IntegerLookup",
        "JaxLayer",
        "LSTMCell",
        "Layer",
        "MaxNumBoundingBoxes",
        "SimpleRNNCell",
        "StringLookup",
        "TFSMLayer",
        "TextVectorization",
        "TorchModuleWrapper",
        "Wrapper",
    ]
)


def _sequence(*layers: Any) -> Any:
    import keras

    return keras.Sequential(layers)


def calls() -> dict[str, Call]:
    """Returns the calls of all functions, by a name for each; in the process of a backend."""
    found: dict[str, Call] = {}
    for name, args, kwargs in _cases():
        arrays: list[np.ndarray] = []
        arguments = _with_places((list(args), kwargs), arrays)
        number = sum(each.name == name for each in found.values())
        found[f"{name} ({number})"] = Call(
            function=f"keras.ops.{name}", layer="", site="", arguments=arguments, inputs=arrays, outputs=[]
        )
    return found


def _with_places(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return Array(len(arrays) - 1)
    if isinstance(value, (list, tuple)):
        return type(value)(_with_places(each, arrays) for each in value)
    return {key: _with_places(each, arrays) for key, each in value.items()} if isinstance(value, dict) else value


def model_of(build: Callable[[], Any], arrays: tuple[np.ndarray, ...]) -> Any:
    """Returns a compiled model around a layer, so that its gradient by its inputs counts, too."""
    import keras

    inputs = [keras.Input(array.shape[1:], dtype=array.dtype.name) for array in arrays]
    given = [
        keras.layers.Dense(array.shape[-1], use_bias=False, kernel_initializer="identity")(tensor)
        if array.dtype.kind == "f"
        else tensor
        for array, tensor in zip(arrays, inputs, strict=True)
    ]
    layer = build()
    several = type(layer).__name__ != "MultiHeadAttention" and type(layer).__name__ != "GroupQueryAttention"
    output = layer(given[0]) if len(given) == 1 else layer(given) if several else layer(*given)
    output = keras.layers.Dense(2)(keras.layers.Flatten()(keras.ops.cast(output, "float64")))
    model = keras.Model(inputs if len(inputs) > 1 else inputs[0], output)
    model.compile("sgd", "mse")
    return model


def work(runner: Any, job: Any, names: list[str], is_plain: bool) -> dict[str, Any]:
    """Runs in the process of a backend; returns by name what each gives, or the words of its refusal."""
    import keras

    from kerasdp.keras_compat.numerics import same_on_all_backends

    found: dict[str, Any] = {}
    with contextlib.nullcontext() if is_plain else same_on_all_backends():
        for name, call in calls().items():
            if not names or call.name in names:
                try:
                    found[name] = _outputs_and_gradients(call, call.inputs)
                except Exception as error:  # whatever a backend says
                    found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    for number, (name, build, arrays) in enumerate(_layers()):
        if names and name not in names:
            continue
        keras.utils.clear_session()  # so that names begin anew
        x = arrays[0] if len(arrays) == 1 else list(arrays)
        own = dataclasses.replace(
            job,
            build_model=lambda build=build, arrays=arrays: model_of(build, arrays),
            data=(x, np.ones((len(arrays[0]), 2))),
            batch_size=len(arrays[0]),
        )
        try:
            found[f"{name} layer {number}"] = _train(runner, own, is_plain)
        except Exception as error:
            found[f"{name} layer {number}"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def missing(names: set[str]) -> list[str]:
    """Returns functions and layers of the installed Keras that no case calls."""
    import keras

    functions = {
        name for name, value in vars(keras.ops).items() if isinstance(value, types.FunctionType) and name[0] != "_"
    }
    layers: dict[Any, list[str]] = {}
    for name, value in vars(keras.layers).items():
        if isinstance(value, type) and issubclass(value, keras.layers.Layer):
            layers.setdefault(value, []).append(name)  # some have several names
    found = sorted(functions - names - _NO_OPERATIONS)
    return found + [each[0] for each in layers.values() if not names & set(each) and not _NO_LAYERS & set(each)]


def apart(first: str, second: str, one: Any, other: Any) -> str:
    """Returns how what two backends give differs; empty if it does not."""
    if isinstance(one, str) or isinstance(other, str):
        refused = [name for name, each in ((first, one), (second, other)) if isinstance(each, str)]
        return "" if len(refused) == 2 else f"{refused[0]} refuses it ({one if isinstance(one, str) else other})"
    if isinstance(one, Steps):
        ways = tuple(parity.Way(backend=name, num_devices=1, precision="float64") for name in (first, second))
        return str(next(_findings(ways, one, other, EXACT), ""))
    for what, values, others in (("output", one[0], other[0]), ("gradient", one[1], other[1])):
        if len(values) != len(others):
            return f"{len(values)} {what}s on {first}, {len(others)} on {second}"
        for number, (value, same) in enumerate(zip(values, others, strict=True)):
            if value.dtype != same.dtype or value.shape != same.shape:
                return f"{what} {number}: {value.dtype}{list(value.shape)} on {first}, {same.dtype}{list(same.shape)}"
            both = [np.nan_to_num(array, nan=1e300) if array.dtype.kind in "fc" else array for array in (value, same)]
            if (by := _apart(*both)) > _of_operation(EXACT, value):
                return f"{what} {number} by {by:.1e}: {_some(value, same)} on {first}, {_some(same, value)} on {second}"
    return ""


def main() -> None:
    """Prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of functions and layers; none: all")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="two or more")
    parser.add_argument("--with_kerasdp", action="store_true", help="with its own functions in place of Keras'")
    args = parser.parse_args()
    backends = args.backends.split(",")
    job = parity.Job(build_model=dict, data=None, steps=1)
    ways = [parity.Way(backend=name, num_devices=1, precision="float64") for name in backends]
    found = {way.backend: call_in(job, way, work, args.names, not args.with_kerasdp) for way in ways}
    first, *others = backends
    differing = 0
    for name, one in found[first].items():
        said = {other: apart(first, other, one, found[other][name]) for other in others}
        if isinstance(one, str) and not any(said.values()):
            print(f"{name}: no backend computes it ({one})")
        for other in filter(said.get, others):
            differing += 1
            print(f"{name}: {said[other]}", flush=True)
    without = missing({name.partition(" ")[0] for name in found[first]}) if not args.names else []
    print(f"{len(found[first])} cases, {differing} differences; without a case: {', '.join(without) or 'nothing'}")
    sys.exit(differing > 0 or bool(without))


if __name__ == "__main__":
    main()
