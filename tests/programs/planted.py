"""Trains models operation by operation, clean or with a fault each, and keeps what `kerasdp.parity.bisect` compares.

python planted.py BACKEND FILE NAME...       # of models (MODELS) or faults (FAULTS)
python planted.py BACKEND FILE --alone FILE  # calls operations alone: a list of pairs of a name and calls
python planted.py BACKEND FILE --clean FILE  # likewise, without the faults

FILE gets, by name, a `Steps`, or what `_call_alone` returns. Files are pickled.
"""

import contextlib
import functools
import pickle
import sys

import numpy as np

import kerasdp
from kerasdp.parity import Job

BATCH = 16


def dense(fault=""):
    import keras

    options = {"momentum": 0.9} if fault == "batch norm's momentum" else {}
    options |= {"epsilon": 1e-2} if fault == "batch norm's epsilon" else {}
    rate = 0.3 if fault == "dropout's rate" else 0.2
    slope = 0.21 if fault == "a slope" else 0.2
    kind = "he_normal" if fault == "an initializer" else "glorot_uniform"
    bias = "ones" if fault == "a bias' initializer" else "zeros"
    return keras.Sequential(
        [
            keras.Input((12,)), keras.layers.Dense(24, "tanh"), keras.layers.BatchNormalization(**options),
            keras.layers.Dropout(rate), keras.layers.Dense(24, "silu", kernel_initializer=kind),
            keras.layers.LeakyReLU(slope), keras.layers.Dense(24, "sigmoid", bias_initializer=bias),
            keras.layers.Dense(3),
        ]
    )  # fmt: skip


def conv(fault=""):
    import keras

    strides = (1, 2) if fault == "strides" else (2, 2)
    crop = ((1, 0), (0, 0)) if fault == "a shift" else ((0, 1), (0, 0))
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)), keras.layers.Conv2D(6, 3, padding="same", activation="relu"),
            keras.layers.DepthwiseConv2D(3, padding="same"), keras.layers.MaxPooling2D(2, strides=strides),
            keras.layers.ZeroPadding2D(crop), keras.layers.Conv2DTranspose(4, 3, activation="elu"),
            keras.layers.AveragePooling2D(2), keras.layers.GroupNormalization(2),
            keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3),
        ]
    )  # fmt: skip


def text(fault=""):
    import keras

    inputs = keras.Input((6,), dtype="int32")
    masked = fault != "a mask"
    x = keras.layers.Embedding(11, 8, mask_zero=masked)(inputs)
    x = keras.layers.LayerNormalization(epsilon=1e-2 if fault == "layer norm's epsilon" else 1e-3)(x)
    causal = fault == "a causal mask"
    y = keras.layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=causal)
    x = keras.layers.Add()([x, y])
    y = keras.layers.Dense(16, "gelu")(x)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(8)(y))
    x = keras.layers.Bidirectional(keras.layers.GRU(5))(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


MODELS = {"dense": dense, "conv": conv, "text": text}
# Of tests/real_code: models that nobody here wrote, in which there is no fault.
CLEAN = [
    "wide_and_deep", "neural_forest", "graph_attention", "message_passing", "point_net", "triplets_in_compute_loss",
    "two_views_loss_function", "distillation", "branches_that_share_weights", "transfer_with_frozen_base",
    "unet_denoiser", "diffusion_in_compute_loss",
]  # fmt: skip


def scaled(original, *args, **kwargs):
    """A value that is off by a thousandth."""
    return original(*args, **kwargs) * 1.001


def rounded(original, *args, **kwargs):
    """A value that was float32 on its way."""
    from keras import ops

    return ops.cast(ops.cast(original(*args, **kwargs), "float32"), "float64")


def other_type(original, *args, **kwargs):
    """A value that is float32."""
    from keras import ops

    return ops.cast(original(*args, **kwargs), "float32")


def half_stopped(original, *args, **kwargs):
    """A right value, with half of its gradient."""
    from keras import ops

    result = original(*args, **kwargs)
    return 0.5 * result + ops.stop_gradient(0.5 * result)


def of(model, module, name, how):
    """A fault of a backend's function, or (`"ops"`) of `keras.ops`; the softmax is a part of the attention."""
    return model, (module, name, how), {"softmax": "dot_product_attention"}.get(name, name)


def built(model, expected):
    """A fault in what builds a model."""
    return model, None, expected


# By name: the model, what is replaced, and what is to be named.
FAULTS = {
    f"{name} {how.__name__}": of(model, module, name, how)
    for model, module, name, how in [
        ("dense", "numpy", "tanh", scaled), ("dense", "numpy", "tanh", half_stopped),
        ("dense", "numpy", "matmul", scaled), ("dense", "numpy", "matmul", rounded),
        ("dense", "numpy", "matmul", half_stopped), ("dense", "nn", "silu", scaled),
        ("dense", "nn", "silu", half_stopped), ("dense", "nn", "sigmoid", scaled),
        ("dense", "nn", "sigmoid", rounded), ("conv", "nn", "elu", half_stopped),
        ("conv", "nn", "relu", scaled), ("conv", "nn", "relu", half_stopped), ("conv", "nn", "conv", scaled),
        ("conv", "nn", "conv", rounded), ("conv", "nn", "conv", half_stopped), ("conv", "nn", "max_pool", scaled),
        ("conv", "nn", "depthwise_conv", half_stopped), ("conv", "nn", "average_pool", half_stopped),
        ("conv", "nn", "elu", other_type), ("conv", "nn", "conv_transpose", scaled),
        ("conv", "numpy", "pad", half_stopped), ("conv", "nn", "conv_transpose", half_stopped),
        ("text", "ops", "gelu", scaled), ("text", "ops", "gelu", half_stopped), ("text", "numpy", "take", scaled),
        ("text", "nn", "softmax", scaled), ("text", "nn", "softmax", half_stopped),
        ("text", "ops", "einsum", rounded),
    ]
} | {
    "batch norm's momentum": built("dense", "moving_mean"), "batch norm's epsilon": built("dense", "BatchNorm"),
    "dropout's rate": built("dense", "dropout"), "a slope": built("dense", "leaky_relu"),
    "an initializer": built("dense", "dense_1/kernel"), "a bias' initializer": built("dense", "dense_2/bias"),
    "strides": built("conv", "max_pool"), "a shift": built("conv", "pad"), "a mask": built("text", "attention"),
    "layer norm's epsilon": built("text", "layer_normalization"), "a causal mask": built("text", "attention"),
    "an optimizer's epsilon": built("dense", "Adam"), "a learning rate": built("dense", "Adam"),
    "an optimizer's momentum": built("dense", "Adam"), "weight decay": built("conv", "Adam"),
    "label smoothing": built("dense", "loss"),
}  # fmt: skip


def data(model):
    random = np.random.RandomState(0)
    shapes = {"dense": (64, 12), "conv": (64, 8, 8, 2), "text": (64, 6)}
    x = random.randint(0, 11, shapes[model]) if model == "text" else random.randn(*shapes[model])
    return x.astype("int32" if model == "text" else "float32"), np.eye(3, dtype="float32")[random.randint(0, 3, 64)]


def build(model, fault):
    import keras

    made = MODELS[model](fault)
    options = {"an optimizer's epsilon": {"epsilon": 1e-5}, "a learning rate": {"learning_rate": 0.0101},
               "an optimizer's momentum": {"beta_1": 0.91}, "weight decay": {"weight_decay": 0.01}}  # fmt: skip
    optimizer = keras.optimizers.Adam(**{"learning_rate": 0.01} | options.get(fault, {}))
    smoothing = 0.1 if fault == "label smoothing" else 0.0
    made.compile(optimizer, keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing))
    return made


@contextlib.contextmanager
def spoiled(fault):
    """The context in which the function of a fault is replaced."""
    import keras
    from keras.src import backend, ops

    from kerasdp.keras_compat.patches import wrapped

    given = FAULTS.get(fault, (None, None, None))[1]
    if given is None:
        yield
        return
    module, name, how = given
    owners = [keras.ops, ops] if module == "ops" else [getattr(backend, module)]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(wrapped(owner, **{name: how}))
        yield


def job_of(model, fault):
    """What is trained: a model of this file, or one of tests/real_code."""
    if model in MODELS:
        return Job(build_model=functools.partial(build, model, fault), data=data(model), steps=2, batch_size=BATCH)
    import keras

    from tests.real_code import cases, train

    ready = cases.load_cases()[model].make(np.random.RandomState(0))
    loss = ready.loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = train.make_optimizer("sgd", cases.OTHER_STEPS.get(model, cases.Steps()))
    ready.model.compile(**{"optimizer": optimizer, "loss": loss} | ready.compile)
    return Job(build_model=lambda: ready.model, data=(ready.x, ready.y), steps=1, batch_size=cases.BATCH)


def work(runner, names, alone, is_faulty):
    import keras

    from kerasdp.parity.bisect import _call_alone, _train

    found = {}
    for name in names:
        keras.utils.clear_session()  # so that names begin again
        model = FAULTS[name][0] if name in FAULTS else name
        with runner.scope():
            job = job_of(model, name)
        with spoiled(name if is_faulty else ""):
            found[name] = _call_alone(runner, job, False, alone[name]) if alone else _train(runner, job, False)
    return found


if __name__ == "__main__":
    backend, file, *names = sys.argv[1:]
    alone = {}
    if (how := names[0]) in ("--alone", "--clean"):
        with open(names[1], "rb") as given:
            alone = dict(pickle.load(given))  # of the tests' own making
        names = list(alone)
    settings = {"backend": backend, "precision": "float64", "verbose": 0}
    results = kerasdp.launch(functools.partial(work, names=names, alone=alone, is_faulty=how != "--clean"), **settings)
    with open(file, "wb") as output:
        pickle.dump(results, output)
    print("RESULT null")
