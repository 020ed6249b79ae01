"""Builds the models of kerasdp/models and of keras_models.py for `jax_loop.py`, and most for `tensorflow_loop.py`.

Of the `Net` of each, which holds the weights by the names of the layers, and does what is done with them.
"""

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import protocol


def find_model(args: Namespace) -> Callable[[Any, Any], Any]:
    """Returns the model `args.model`, a function of a net and inputs."""
    if args.model in protocol.TEXTS:
        model = {"gpt": gpt, "bert": bert, "llama": llama, "tagger": tagger}[args.model]
        return functools.partial(model, vocabulary=args.vocabulary, width=args.width)
    if args.model in protocol.WIDTHS:
        model = {"segmentation": segmentation, "vit": vit, "unet": unet, "efficientnet": efficientnet}[args.model]
        return functools.partial(model, width=args.width)
    return {"convnet": convnet, "resnet18": resnet18, "resnet50": resnet50}[args.model]


def is_trained(layer: str, model: str) -> bool:
    """Returns whether the weights of a layer train: of llama the adapters alone."""
    return model != "llama" or layer.endswith("_lora")


def convnet(net: Any, x: Any) -> Any:
    """Builds what `convnet` of kerasdp/models/classifiers.py builds."""
    x = net.relu(net.norm("norm1", net.conv("conv1", x, 12, 3, bias=False), scale=False))
    x = net.relu(net.norm("norm2", net.conv("conv2", x, 24, 6, 2, bias=False, is_padded=False), scale=False))
    x = net.relu(net.norm("norm3", net.conv("conv3", x, 32, 6, 2), scale=False))
    x = net.relu(net.dense("dense1", net.mean(x), 256))
    return net.dense("logits", net.dropout(x, 0.5), protocol.NUM_CLASSES)


def resnet18(net: Any, x: Any) -> Any:
    """Builds what `resnet18` of kerasdp/models/classifiers.py builds."""
    norm = {"epsilon": 1e-5, "momentum": 0.9}
    x = net.relu(net.norm("stem_norm", net.conv("stem_conv", x, 64, 3), **norm))
    for stage, filters in enumerate((64, 128, 256, 512), 1):
        for block in (1, 2):
            name, strides = f"stage{stage}_block{block}", 2 if block == 1 and stage > 1 else 1
            y = net.relu(net.norm(f"{name}_norm1", net.conv(f"{name}_conv1", x, filters, 3, strides), **norm))
            y = net.norm(f"{name}_norm2", net.conv(f"{name}_conv2", y, filters, 3), **norm)
            if strides != 1:
                x = net.conv(f"{name}_shortcut", x, filters, 1, strides)
            x = net.relu(x + y)
    return net.dense("logits", net.mean(x), protocol.NUM_CLASSES)


def resnet50(net: Any, x: Any) -> Any:
    """Builds what `resnet50` of kerasdp/models/classifiers.py builds."""

    def conv_norm(name: str, x: Any, filters: int, size: int, strides: int = 1) -> Any:
        x = net.conv(f"{name}_conv", x, filters, size, strides, bias=False)
        return net.norm(f"{name}_norm", x, epsilon=1e-5, momentum=0.9)

    x = net.max_pool(net.relu(conv_norm("stem", x, 64, 7, 2)))
    for stage, (filters, num_blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(1, num_blocks + 1):
            name, strides = f"stage{stage}_block{block}", 2 if block == 1 and stage > 1 else 1
            y = net.relu(conv_norm(f"{name}_1", x, filters, 1))
            y = net.relu(conv_norm(f"{name}_2", y, filters, 3, strides))
            y = conv_norm(f"{name}_3", y, 4 * filters, 1)
            if block == 1:
                x = conv_norm(f"{name}_shortcut", x, 4 * filters, 1, strides)
            x = net.relu(x + y)
    return net.dense("logits", net.mean(x), protocol.NUM_CLASSES)


def gpt(net: Any, x: Any, vocabulary: int, width: int) -> Any:
    """Builds what keras_models.py builds."""
    x = net.embedding("tokens", x, vocabulary, width) + net.table("positions", x.shape[1], width)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        name = f"block{number}"
        qkv = net.dense(f"{name}_qkv", net.layer_norm(f"{name}_norm1", x), 3 * width)
        x = x + net.dense(f"{name}_out", net.attend(qkv, is_causal=True), width)
        y = net.dense(f"{name}_up", net.layer_norm(f"{name}_norm2", x), 4 * width)
        x = x + net.dense(f"{name}_down", net.gelu(y), width)
    return net.dense("logits", net.layer_norm("norm", x), vocabulary)


def segmentation(net: Any, x: Any, width: int) -> Any:
    """Builds what keras_models.py builds."""

    def halve(name: str, x: Any, filters: int) -> Any:
        return net.relu(net.norm(f"{name}_norm", net.conv(name, x, filters, 4, 2, bias=False)))

    def join(name: str, x: Any, other: Any) -> Any:
        return net.relu(net.norm(f"{name}_norm", net.double(name, x, other.shape[-1])) + other)

    half = halve("down1", x, width)
    quarter = halve("down2", half, 2 * width)
    x = halve("down3", quarter, 4 * width)
    x = join("up2", join("up1", x, quarter), half)
    return net.double("logits", x, protocol.SEGMENTATION_CLASSES, bias=True)


def bert(net: Any, x: Any, vocabulary: int, width: int) -> Any:
    """Builds what keras_transformers.py builds."""
    mask, length = x["padding_mask"], x["token_ids"].shape[1]
    x = net.embedding("tokens", x["token_ids"], vocabulary, width) + net.embedding(
        "segments", x["segment_ids"], 2, width
    )
    x = net.layer_norm("norm", x + net.table("positions", length, width), 1e-12)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        name = f"block{number}"
        y = net.dense(f"{name}_out", net.attend(net.dense(f"{name}_qkv", x, 3 * width), mask=mask), width)
        x = net.layer_norm(f"{name}_norm1", x + y, 1e-12)
        y = net.dense(f"{name}_down", net.gelu_by_tanh(net.dense(f"{name}_up", x, 4 * width)), width)
        x = net.layer_norm(f"{name}_norm2", x + y, 1e-12)
    return net.dense("logits", net.tanh(net.dense("pooled", x[:, 0], width)), protocol.NUM_CLASSES)


def vit(net: Any, x: Any, width: int) -> Any:
    """Builds what keras_transformers.py builds."""
    x = net.conv("patches", x, width, protocol.PATCH, protocol.PATCH, is_padded=False)
    x = net.with_token("token", net.sequence(x))
    x = x + net.table("positions", x.shape[1], width)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        name = f"block{number}"
        qkv = net.dense(f"{name}_qkv", net.layer_norm(f"{name}_norm1", x, 1e-6), 3 * width)
        x = x + net.dense(f"{name}_out", net.attend(qkv), width)
        y = net.dense(f"{name}_up", net.layer_norm(f"{name}_norm2", x, 1e-6), 4 * width)
        x = x + net.dense(f"{name}_down", net.gelu(y), width)
    return net.dense("logits", net.layer_norm("norm", x, 1e-6)[:, 0], protocol.NUM_CLASSES)


def llama(net: Any, x: Any, vocabulary: int, width: int) -> Any:
    """Builds what keras_transformers.py builds; what trains is in layers whose names end with `_lora`."""
    size, few = width // protocol.NUM_HEADS, protocol.NUM_KEY_HEADS
    x = net.embedding("tokens", x, vocabulary, width)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        name = f"block{number}"
        y = net.rms_norm(f"{name}_norm1", x)
        query = net.adapted(f"{name}_query", y, protocol.NUM_HEADS, size)
        key = net.heads(net.dense(f"{name}_key", y, few * size, bias=False), few)
        attended = net.attend_before(net.rotated(query), net.rotated(key), net.adapted(f"{name}_value", y, few, size))
        x = x + net.dense(f"{name}_out", attended, width, bias=False)
        y = net.rms_norm(f"{name}_norm2", x)
        gate = net.swish(net.dense(f"{name}_gate", y, 3 * width, bias=False))
        y = gate * net.dense(f"{name}_up", y, 3 * width, bias=False)
        x = x + net.dense(f"{name}_down", y, width, bias=False)
    return net.dense("logits", net.rms_norm("norm", x), vocabulary, bias=False)


def tagger(net: Any, x: Any, vocabulary: int, width: int) -> Any:
    """Builds what keras_nets.py builds."""
    mask = x != 0
    x = net.embedding("tokens", x, vocabulary, width)
    both = [net.lstm(f"{name}_lstm", x, mask, width, is_reverse=name == "backward") for name in ("forward", "backward")]
    return net.dense("logits", net.join(both), protocol.NUM_CLASSES)


def unet(net: Any, x: Any, width: int) -> Any:
    """Builds what keras_nets.py builds."""

    def residual(name: str, x: Any, filters: int) -> Any:
        y = net.conv(f"{name}_conv1", net.swish(net.group_norm(f"{name}_norm1", x)), filters, 3)
        y = y + net.dense(f"{name}_time", time, filters)[:, None, None]
        y = net.conv(f"{name}_conv2", net.swish(net.group_norm(f"{name}_norm2", y)), filters, 3)
        return (x if x.shape[-1] == filters else net.conv(f"{name}_shortcut", x, filters, 1)) + y

    filters = [width, 2 * width, 4 * width]
    time = net.swish(net.dense("time1", net.waves(x["timestep"], width), 4 * width))
    time = net.swish(net.dense("time2", time, 4 * width))
    x, kept = net.conv("stem", x["image"], width, 3), []
    for level, count in enumerate(filters):
        x = residual(f"down{level}", x, count)
        kept.append(x)
        if level < len(filters) - 1:
            x = net.conv(f"halve{level}", x, count, 3, 2, is_same=True)
    x = residual("first", x, filters[-1])
    y = net.sequence(net.group_norm("middle_norm", x))
    y = net.dense("middle_out", net.attend(net.dense("middle_qkv", y, 3 * filters[-1])), filters[-1])
    x = residual("second", x + net.pixels(y, x), filters[-1])
    for level, count in reversed(list(enumerate(filters))):
        x = residual(f"up{level}", net.join([x, kept.pop()]), count)
        if level:
            x = net.conv(f"double{level}", net.enlarge(x), count, 3)
    return net.conv("noise", net.swish(net.group_norm("norm", x)), 3, 3)


def efficientnet(net: Any, x: Any, width: int) -> Any:
    """Builds what keras_nets.py builds."""

    def conv_norm(name: str, x: Any, filters: int, size: int = 1, strides: int = 1, groups: int = 1) -> Any:
        x = net.conv(name, x, filters, size, strides, bias=False, is_same=True, groups=groups)
        return net.norm(f"{name}_norm", x, momentum=0.9)

    def inverted(name: str, x: Any, filters: int, strides: int, widening: int, is_fused: bool) -> Any:
        channels, wide = x.shape[-1], widening * x.shape[-1]
        if is_fused:
            y = net.swish(conv_norm(f"{name}_expand", x, wide if widening > 1 else filters, 3, strides))
        else:
            y = net.swish(conv_norm(f"{name}_expand", x, wide))
            y = net.swish(conv_norm(f"{name}_depthwise", y, wide, 3, strides, groups=wide))
            mean = net.swish(net.dense(f"{name}_squeeze", net.mean(y), channels // 4))
            y = y * net.sigmoid(net.dense(f"{name}_excite", mean, wide))[:, None, None]
        if widening > 1:
            y = conv_norm(f"{name}_project", y, filters)
        return x + y if strides == 1 and channels == filters else y

    x = net.swish(conv_norm("stem", x, width, 3, 2))
    for stage, (is_fused, num_blocks, part, strides, widening) in enumerate(protocol.STAGES, 1):
        for block in range(1, num_blocks + 1):
            name = f"stage{stage}_block{block}"
            x = inverted(name, x, int(part * width), strides if block == 1 else 1, widening, is_fused)
    return net.dense("logits", net.mean(net.swish(conv_norm("head", x, 12 * width))), protocol.NUM_CLASSES)
