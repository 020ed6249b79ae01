"""Counts the arithmetic operations of a model's layers, and of training steps of the models of `protocol.REAL`."""

from typing import Any

import numpy as np
import protocol


def flops_of(model: Any) -> list[float]:
    """Returns the operations of each call of a layer in a sample's forward pass.

    Two for each weight and position of the output; one for each number of an output without weights.

    Args:
        model: functional, built.
    """
    from kerasdp.scale.pipeline import Graph

    return [float(_flops(call)) for call in Graph(model).calls]


def _flops(call: Any) -> int:
    kernels = [weight for weight in getattr(call.operation, "weights", []) if len(weight.shape) > 1]
    shape = [size or 1 for size in call.outputs[0].shape[1:]]
    if not kernels:
        return int(np.prod(shape))
    # Channels come last, or, where the layer says so, first.
    first = getattr(call.operation, "data_format", None) == "channels_first"
    positions = int(np.prod(shape[1:] if first else shape[:-1]))
    return 2 * positions * sum(int(np.prod(kernel.shape)) for kernel in kernels)


def training_flops(model: str) -> float:
    """Returns the operations that a training step of a model of `protocol.REAL` needs for a sample.

    It counts matrix products and convolutions. A multiplication and an addition are two operations. Causal attention
    counts as full attention. The backward pass needs twice the operations of the forward pass. If weights are frozen,
    it needs as many. Source: Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B.
    """
    size = protocol.REAL[model]
    if size.width is None:
        return 6.0 * _products_of_resnet50(size.shape, size.num_classes)
    width, num_blocks = size.width, size.num_blocks
    length = 1 + size.shape[0] * size.shape[1] // size.patch**2 if model == "vit" else size.shape[0]
    attention = num_blocks * 2 * length**2 * width
    if model == "llama":
        part = width // size.num_heads  # of a head
        block = 2 * width**2 + 2 * width * size.num_key_heads * part + 9 * width**2
        adapters = num_blocks * (size.num_heads + size.num_key_heads) * protocol.LORA_RANK * (width + part)
        frozen = length * (num_blocks * block + width * size.vocabulary)
        return 4.0 * frozen + 6.0 * (length * adapters + attention)
    blocks = length * num_blocks * 12 * width**2
    ends = {
        "gpt": length * width * size.vocabulary,
        "bert": width**2 + width * size.num_classes,
        "vit": (length - 1) * size.patch**2 * 3 * width + width * size.num_classes,
    }[model]
    return 6.0 * (blocks + attention + ends)


def _products_of_resnet50(shape: tuple[int, ...], classes: int) -> int:
    """Returns the multiplications of a forward pass."""
    rows, columns, channels = -(-shape[0] // 2), -(-shape[1] // 2), 64
    found = rows * columns * 7 * 7 * shape[2] * channels
    rows, columns = -(-rows // 2), -(-columns // 2)
    for filters, num_blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(num_blocks):
            found += rows * columns * channels * filters  # before the stride
            if block == 0 and filters > 64:
                rows, columns = -(-rows // 2), -(-columns // 2)
            found += rows * columns * (9 * filters**2 + 4 * filters**2)
            if block == 0:
                found += rows * columns * channels * 4 * filters  # the shortcut
            channels = 4 * filters
    return found + channels * classes
