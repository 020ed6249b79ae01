"""Some steps of a loop of benchmarks/, and of Keras with the same weights: parameters and losses of both."""

import argparse
import json
import os
import pathlib
import sys

BACKEND, MODEL = sys.argv[1:]
BATCH_SIZE, STEPS = 8, 3
# Round-off grows with the rate in deep networks.
LEARNING_RATE = 1e-2 if MODEL in ("convnet", "bert", "vit", "llama", "tagger") else 1e-4
os.environ |= {"KERAS_BACKEND": BACKEND, "KERAS_TORCH_DEVICE": "cpu"}
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))


def make_args():
    import protocol

    return argparse.Namespace(
        model=MODEL, batch_size=BATCH_SIZE, devices=1, precision="float32", device="cpu", batch_norm="sync",
        compile=False, shard="none", vocabulary=500, width=protocol.WIDTHS.get(MODEL),
    )  # fmt: skip


def arrays_by_name(model):
    """The weights by layer and kind, as the loops name them: `conv1/kernel`, `block1_up/bias`."""
    import keras
    import numpy as np

    found = {}
    for weight in model.weights:
        *layers, kind = weight.path.removeprefix("embedding/").split("/")
        layer, kind = {"class_token": ("token", "kernel"), "embeddings": ("_".join(layers), "kernel")}.get(
            kind, ("_".join(layers), kind)
        )
        found[f"{layer}/{kind}"] = keras.ops.convert_to_numpy(weight.value).copy()
    if MODEL == "tagger":
        return {path.removeprefix("recurrent_").replace("_lstm_lstm_cell", "_lstm"): found[path] for path in found}
    if MODEL == "llama":
        for path, value in list(found.items()):
            name = path.replace("_attention", "").replace("_output", "_out").replace("/lora_kernel_", "_lora/")
            found[name] = value
        return found
    for layer in {path.removesuffix("_query/kernel") for path in found if path.endswith("_attention_query/kernel")}:
        block = layer.removesuffix("_attention")
        width = len(found[f"{layer}_query/kernel"])
        for kind, shape in (("kernel", (width, width)), ("bias", (width,))):
            parts = [found[f"{layer}_{part}/{kind}"].reshape(shape) for part in ("query", "key", "value")]
            found[f"{block}_qkv/{kind}"] = np.concatenate(parts, -1)
            found[f"{block}_out/{kind}"] = found[f"{layer}_attention_output/{kind}"].reshape(shape)
    return found


def name_of_torch(path):
    """A torch parameter's name in `arrays_by_name`."""
    if path.startswith("lstm."):
        kind = {"weight_ih": "kernel", "weight_hh": "recurrent_kernel", "bias_ih": "bias"}
        which = path.removeprefix("lstm.").removesuffix("_reverse").removesuffix("_l0")
        return f"{'backward' if path.endswith('_reverse') else 'forward'}_lstm/{kind.get(which)}"
    layer, kind = ("token", "weight") if path == "token" else path.replace(".", "_").rsplit("_", 1)
    norm = {"weight": "scale" if MODEL == "llama" else "gamma", "bias": "beta"}
    return f"{layer}/{(norm if 'norm' in layer else {'weight': 'kernel'}).get(kind, kind)}"


def of_torch(layer, value):
    """A weight of Keras with the order of torch's axes."""
    if MODEL == "segmentation" and layer in ("up1", "up2", "logits"):  # torch's pixel_shuffle has its pixels last
        value = value.reshape(*value.shape[:-1], 4, -1).swapaxes(-1, -2).reshape(value.shape)
    if layer in ("tokens", "positions", "segments", "token"):
        return value
    if value.ndim == 3:  # to heads, or from them
        value = value.reshape((-1, value.shape[-1]) if layer.endswith("out") else (len(value), -1))
    if layer.endswith("depthwise"):
        value = value.swapaxes(2, 3)
    return value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T


def torch_loop(weights):
    import torch
    import torch_loop

    model = torch_loop.make_model(make_args())
    with torch.no_grad():
        for path, weight in model.named_parameters():
            name = name_of_torch(path)
            if weight.requires_grad or name in weights:
                weight.copy_(torch.from_numpy(of_torch(name.split("/")[0], weights[name]).copy()))
    if hasattr(model, "dropout"):
        model.dropout.p = 0.0
    return torch_loop.Loop(make_args(), model=model)


def jax_loop(weights):
    import functools

    import jax
    import jax_loop

    loop = jax_loop.Loop(make_args())
    for part in ("weights", "frozen"):
        values = {
            layer: {kind: weights[f"{layer}/{kind}"].reshape(value.shape) for kind, value in kinds.items()}
            for layer, kinds in loop.state[part].items()
        }
        loop.state[part] = jax.device_put(values, loop.copied)
    loop.step = functools.partial(loop.step, drop=False)
    return loop


def tensorflow_loop(weights):
    import tensorflow_loop

    loop = tensorflow_loop.Loop(make_args(), drop=False)
    for name, weight in loop.net.weights.items():
        weight.assign(weights[name])
    return loop


def trained(model):
    """What Keras' own step gives for the same batches."""
    import protocol

    inputs, labels = protocol.make_data(make_args())
    found = []
    for index, _ in zip(protocol.batches(MODEL, BATCH_SIZE), range(STEPS), strict=False):
        model.reset_metrics()
        batch = {name: part[index] for name, part in inputs.items()} if isinstance(inputs, dict) else inputs[index]
        found.append(model.train_on_batch(batch, labels[index], return_dict=True))
    return found


def main():
    import keras
    import protocol

    from kerasdp import build_model

    keras.utils.set_random_seed(0)
    protocol.LEARNING_RATE = LEARNING_RATE
    if BACKEND == "jax":  # before Keras starts it
        import jax

        jax.config.update("jax_num_cpu_devices", 1)
    import keras_models

    if MODEL in protocol.WIDTHS:
        model = keras_models.make_model(make_args())
    else:
        model = build_model(MODEL, protocol.SHAPES[MODEL], protocol.NUM_CLASSES)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    for weight in model.trainable_weights:
        if weight.path.endswith("lora_kernel_b"):  # of zeros at first, which would hide the other half
            weight.assign(keras.random.normal(weight.shape, stddev=0.1))
    model.compile(
        keras.optimizers.SGD(protocol.LEARNING_RATE, protocol.MOMENTUM), **keras_models.make_loss(make_args())
    )
    loop = {"torch": torch_loop, "jax": jax_loop, "tensorflow": tensorflow_loop}[BACKEND](arrays_by_name(model))
    theirs = [loop.repeat(1) for _ in range(STEPS)]
    ours = trained(model)
    parameters = sum(int(keras.ops.size(weight)) for weight in model.trainable_weights)
    found = {
        kind: [[float(logs.get(kind, 0)) for logs in side] for side in (theirs, ours)] for kind in ("loss", "accuracy")
    }
    print("RESULT", json.dumps({"parameters": [int(loop.num_parameters), parameters]} | found))


if __name__ == "__main__":
    main()
