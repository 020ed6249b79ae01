"""What the tests make of the classes of `keras_hub.layers` that have weights, KerasHub 0.32."""

import inspect
from typing import Any

from keras_hub import layers as L

LAYERS: dict[str, Any] = {
    "CachedMultiHeadAttention": (lambda: L.CachedMultiHeadAttention(8, 32), ((2, 5, 128), (2, 5, 128))),
    "FNetEncoder": (lambda: L.FNetEncoder(100, dropout=0.1), (2, 5, 64)),
    "PositionEmbedding": (lambda: L.PositionEmbedding(40), (2, 5, 64)),
    "RMSNormalization": (lambda: L.RMSNormalization(64), (2, 5, 64)),
    "ReversibleEmbedding": (lambda: L.ReversibleEmbedding(100, 50, tie_weights=False), (2, 5)),
    "TokenAndPositionEmbedding": (lambda: L.TokenAndPositionEmbedding(100, 40, 50), (2, 5)),
    "TransformerDecoder": (lambda: L.TransformerDecoder(100, 4, dropout=0.1), ((2, 5, 64), (2, 7, 64))),
    "TransformerEncoder": (
        lambda: L.TransformerEncoder(100, 4, dropout=0.1, kernel_initializer="he_normal"),
        (2, 5, 64),
    ),
}
LEFT_OUT = {
    "MaskedLMHead": "needs positions as integers; its layers are Dense",
    **{
        f"SAM{name}": "takes six tensors and more; a part of one model"
        for name in ("MaskDecoder", "PromptEncoder", *(f"3{part}" for part in (
            "DetrDecoder", "DetrEncoder", "GeometryEncoder", "MaskDecoder", "TextEncoder", "VisionEncoder")))
    },
}  # fmt: skip
WITHOUT = [
    "AlibiBias", "AnchorGenerator", "BoxMatcher", "MaskedLMMaskGenerator", "MultiSegmentPacker", "NonMaxSuppression",
    "RandomDeletion", "RandomSwap", "RotaryEmbedding", "SinePositionEncoding", "StartEndPacker",
]  # fmt: skip


def unlisted() -> list[str]:
    """Returns names of classes that are in none of the lists, and listed ones that KerasHub does not have."""
    classes = {name for name in dir(L) if inspect.isclass(getattr(L, name)) and not name.endswith("Converter")}
    return sorted(classes ^ {*LAYERS, *LEFT_OUT, *WITHOUT})
