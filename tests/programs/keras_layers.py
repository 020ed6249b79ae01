"""What the tests make of every class of `keras.layers`, Keras 3.15.

Large enough that mean and spread of each random weight say what its distribution is.
"""

import inspect
from typing import Any

import keras

L = keras.layers
# Makes a layer, and shapes of its inputs: a tuple of several is several arguments, a list one argument.
LAYERS: dict[str, Any] = {
    "AdditiveAttention": (lambda: L.AdditiveAttention(), [(2, 5, 900), (2, 7, 900)]),
    "Attention": (lambda: L.Attention(use_scale=True, dropout=0.1), [(2, 5, 400), (2, 7, 400)]),
    "BatchNormalization": (
        lambda: L.BatchNormalization(beta_initializer="random_normal", gamma_initializer="he_uniform"),
        (2, 2000),
    ),
    "Bidirectional": (lambda: L.Bidirectional(L.LSTM(40)), (2, 5, 30)),
    "Conv1D": (lambda: L.Conv1D(40, 3), (2, 9, 30)),
    "Conv1DTranspose": (lambda: L.Conv1DTranspose(40, 3), (2, 9, 30)),
    "Conv2D": (lambda: L.Conv2D(40, 3, kernel_initializer="orthogonal"), (2, 9, 9, 30)),
    "Conv2DTranspose": (lambda: L.Conv2DTranspose(40, 3), (2, 9, 9, 30)),
    "Conv3D": (lambda: L.Conv3D(20, 3, groups=2), (2, 5, 5, 5, 20)),
    "Conv3DTranspose": (lambda: L.Conv3DTranspose(20, 3), (2, 5, 5, 5, 20)),
    "ConvLSTM1D": (lambda: L.ConvLSTM1D(20, 3), (2, 3, 9, 10)),
    "ConvLSTM2D": (lambda: L.ConvLSTM2D(10, 3), (2, 3, 9, 9, 10)),
    "ConvLSTM3D": (lambda: L.ConvLSTM3D(5, 3), (2, 3, 5, 5, 5, 5)),
    "Dense": (lambda: L.Dense(600, bias_initializer="truncated_normal"), (2, 20)),
    "DepthwiseConv1D": (lambda: L.DepthwiseConv1D(9, depth_multiplier=4), (2, 9, 100)),
    "DepthwiseConv2D": (lambda: L.DepthwiseConv2D(5, depth_multiplier=4), (2, 9, 9, 40)),
    "EinsumDense": (lambda: L.EinsumDense("abc,cde->abde", (None, 8, 32), bias_axes="de"), (2, 5, 64)),
    "Embedding": (lambda: L.Embedding(100, 50), (2, 5)),
    "GRU": (lambda: L.GRU(50, dropout=0.1), (2, 5, 40)),
    "GRUCell": (lambda: L.RNN(L.GRUCell(50)), (2, 5, 40)),
    "GroupNormalization": (lambda: L.GroupNormalization(4), (2, 8)),
    "GroupQueryAttention": (lambda: L.GroupQueryAttention(32, 8, 2), ((2, 5, 128), (2, 7, 128))),
    "LSTM": (lambda: L.LSTM(150, bias_initializer="random_normal"), (2, 5, 40)),
    "LSTMCell": (lambda: L.RNN(L.LSTMCell(50)), (2, 5, 40)),
    "LayerNormalization": (lambda: L.LayerNormalization(), (2, 8)),
    "MultiHeadAttention": (lambda: L.MultiHeadAttention(8, 32, dropout=0.1), ((2, 5, 128), (2, 7, 128))),
    "Normalization": (lambda: L.Normalization(), (2, 8)),
    "PReLU": (lambda: L.PReLU("he_normal"), (2, 50, 40)),
    "RMSNormalization": (lambda: L.RMSNormalization(), (2, 8)),
    "RNN": (lambda: L.RNN([L.SimpleRNNCell(40), L.GRUCell(40)]), (2, 5, 40)),
    "ReversibleEmbedding": (lambda: L.ReversibleEmbedding(100, 50, tie_weights=False), (2, 5)),
    "STFTSpectrogram": (lambda: L.STFTSpectrogram(frame_length=8, frame_step=4, fft_length=8), (2, 40, 1)),
    "SeparableConv1D": (lambda: L.SeparableConv1D(50, 9, depth_multiplier=3), (2, 9, 40)),
    "SeparableConv2D": (lambda: L.SeparableConv2D(50, 5), (2, 9, 9, 40)),
    "SimpleRNN": (lambda: L.SimpleRNN(50), (2, 5, 40)),
    "SimpleRNNCell": (lambda: L.RNN(L.SimpleRNNCell(50)), (2, 5, 40)),
    "SpectralNormalization": (lambda: L.SpectralNormalization(L.Dense(500)), (2, 30)),
    "StackedRNNCells": (lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(30), L.GRUCell(40)])), (2, 5, 40)),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(50)), (2, 5, 40)),
    # Weights of these are the states of their random numbers.
    **{name: (lambda name=name: getattr(L, name)(0.3), (2, 9)) for name in
       ("AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise")},
    **({"TernaryDense": (lambda: L.TernaryDense(600), (2, 20))} if hasattr(L, "TernaryDense") else {}),  # Keras 3.16
    **{f"SpatialDropout{n}D": (lambda n=n: getattr(L, f"SpatialDropout{n}D")(0.3), (2, *[5] * (n + 1)))
       for n in (1, 2, 3)},
    **{f"Random{name}": (lambda name=name, arguments=arguments: getattr(L, f"Random{name}")(*arguments), (2, 8, 8, 3))
       for name, arguments in {
           "Brightness": [0.1], "ColorDegeneration": [0.1], "ColorJitter": [], "Contrast": [0.1], "Crop": [6, 6],
           "ElasticTransform": [], "Erasing": [], "Flip": [], "GaussianBlur": [], "Grayscale": [], "Hue": [0.1],
           "Invert": [], "Perspective": [], "Posterization": [4], "Rotation": [0.1], "Saturation": [0.1],
           "Sharpness": [0.1], "Shear": [0.1, 0.1], "Translation": [0.1, 0.1], "Zoom": [0.1]}.items()},
    **{name: (lambda name=name: getattr(L, name)(), (2, 8, 8, 3)) for name in
       ("AugMix", "CutMix", "MixUp", "Mosaic", "RandAugment", "Solarization") if hasattr(L, name)},
}  # fmt: skip
LEFT_OUT = {
    "FlaxLayer": "draws with jax' own seeds: jax alone has it",
    "JaxLayer": "draws with jax' own seeds: jax alone has it",
    "TorchModuleWrapper": "draws with torch's generator: torch alone has it",
    "TFSMLayer": "loads its weights from a file",
    "IntegerLookup": "keeps its table in TensorFlow",
    "StringLookup": "keeps its table in TensorFlow",
}
MAKES_WEIGHTS = {"add_weight", "add_variable", "SeedGenerator", "Variable", *LAYERS}


def unlisted() -> list[str]:
    """Returns names of classes in no list whose code makes weights, or layers that have some."""
    classes = {name: kind for name, kind in vars(L).items() if inspect.isclass(kind) and issubclass(kind, L.Layer)}
    known = {classes[name] for name in (*LAYERS, *LEFT_OUT) if name in classes}
    makes = {name for name, kind in classes.items() if any(MAKES_WEIGHTS & _names(one) for one in _ancestors(kind))}
    return sorted(name for name in makes if classes[name] not in known)


def _ancestors(kind: type) -> list[type]:
    return [one for one in kind.__mro__ if issubclass(one, L.Layer) and one is not L.Layer]


def _names(kind: type) -> set[str]:
    """Returns what the functions of a class refer to, but for one by which an augmentation gets its generator."""
    functions = [
        inspect.unwrap(value)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and name != "_get_seed_generator"
    ]
    return {name for function in functions for name in function.__code__.co_names}
