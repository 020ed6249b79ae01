"""Trains, evaluates and predicts on a CUDA device that is none, and prints what the compiled steps hold.

python capture_for_cuda.py CASES [cpu]: on the CPU as such, to compare with; a JSON list of cases; each holds fields of
kerasdp.Config, and
    model, optimizer: as `kerasdp.build_model` and `kerasdp.make_optimizer` take them
    image: shape of an image, [28, 28, 1] if it is left out
    num_devices: if there are several, they are ranks that hold what rank 0 does
    layer: "adding" or "drawing" puts a layer before the model that computes on the CPU
    net: a model of tests/real_code, by name, instead of a model of the kit
    cudnn: whether recurrent layers are cuDNN's, as Keras has them on a GPU
    runs: whether the captured steps run, operation by operation, or give zeros
"""

import contextlib
import functools
import json
import os
import sys
import types

import cuda_on_cpu
import numpy as np

DEVICE = "cpu" if sys.argv[2:] == ["cpu"] else "gpu"
if DEVICE == "gpu":
    cuda_on_cpu.start()

import torch  # noqa: E402

import kerasdp  # noqa: E402

NUM_STEPS, NUM_ROWS = 3, 8
OWN = ("model", "optimizer", "image", "runs", "layer", "net")
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
join_group = torch.distributed.init_process_group
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def is_on(value, kind):
    return isinstance(value, torch.Tensor) and value.device.type == kind


def counts(graph):
    """What of a captured step is on the CPU, or comes from there."""
    values = {
        node: getattr(graph, node.target) if node.op == "get_attr" else node.meta.get("val")
        for node in graph.graph.nodes
    }
    constants = [value for node, value in values.items() if node.op == "get_attr"]
    return {
        "nodes": len(values),
        "on the CPU": sum(is_on(value, "cpu") for value in values.values()),
        "numbers in memory": sum(is_on(value, "cuda") and value.numel() == 1 for value in constants),
        "collectives": sum(getattr(node.target, "namespace", "") == "_c10d_functional" for node in values),
        "read": sum(node.target in READS for node in values),
        "copied": sum(
            node.target in COPIES
            and is_on(value, "cuda")
            and any(is_on(values.get(source), "cpu") for source in node.all_input_nodes)
            for node, value in values.items()
        ),
    }


def on_the_cpu(kind):
    """A layer that is written without a thought for GPUs."""
    import keras

    class OnTheCPU(keras.layers.Layer):
        def call(self, inputs):
            if kind == "drawing":  # numbers that a GPU would draw otherwise
                noise = torch.rand(inputs.shape[-1])
            else:
                noise = torch.arange(inputs.shape[-1]) * 2 + torch.as_tensor(np.float32([1.0]))
            return keras.ops.cast(inputs, "float32") + noise.to(inputs.device)

    return OnTheCPU()


def train(found, runner, model="lenet", optimizer="sgd", image=(28, 28, 1), runs=False, layer=None, net=None):
    """A few steps of each kind; losses, outputs, and in `found` what the steps hold."""
    import keras
    from learn_classes import fitted

    from tests.real_code import cases

    numbers, size = np.random.RandomState(0), {"batch_size": cases.BATCH if net else NUM_ROWS}
    with runner.scope():
        if net:
            ready = cases.load_cases()[net].make(numbers)
        else:
            x = numbers.randint(0, 256, (NUM_STEPS * NUM_ROWS, *image)).astype("uint8")
            model = kerasdp.build_model(model, image, 10)
            if layer:
                model = keras.Sequential([keras.Input(image), on_the_cpu(layer), model])
            ready = cases.Ready(model=model, x=x, y=numbers.randint(0, 10, len(x)))
        loss = ready.loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        ready.model.compile(kerasdp.make_optimizer(optimizer), loss, metrics=["accuracy"])
    with watched(found, runs):
        losses, _ = fitted(runner, ready.model, ready.x, ready.y, **size)
        evaluated = runner.evaluate(ready.model, ready.x, ready.y, **size)
        outputs = runner.predict(ready.model, ready.x, **size)
    return {"losses": losses, "evaluated": evaluated, "outputs": outputs.tolist()} if runs else {}


@contextlib.contextmanager
def watched(found, runs):
    """The context in which the steps that are captured are looked at, instead of compiled."""
    from kerasdp.backends.torch import compiled_step
    from kerasdp.keras_compat.patches import replaced, wrapped

    def capture(captured, graphs, *args):
        graph, places = captured(graphs, *args)
        found[graphs.name] = counts(graph)
        return graph, places

    def compiled(graph, *_):
        if runs:
            return torch.no_grad()(graph)
        (leaves,) = graph.graph.output_node().args
        results = [zeros(leaf.meta["val"]) for leaf in leaves]
        return lambda *_: results

    with (
        wrapped(compiled_step.CompiledStep, _captured=capture),
        replaced(compiled_step, compile_with_inductor=compiled),
    ):
        yield


def zeros(value):
    """Numbers of no meaning, on the device."""
    return torch.zeros(value.shape, dtype=value.dtype, device="cuda")


def be_first_of(num_ranks):
    """Lets this process be rank 0 of several, of which the others hold whatever this one does."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from kerasdp.backends.torch import devices
    from kerasdp.contract import SingleProcess

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    torch.cuda.device_count = lambda: num_ranks
    properties = types.SimpleNamespace(name="none", major=9, minor=0, total_memory=2**30, multi_processor_count=132)
    torch.cuda.get_device_properties = lambda *_, **__: properties

    class Ranks(SingleProcess):
        num_processes = num_ranks

        def all_gather_object(self, value):
            return [value] * num_ranks

    def join(*_):
        join_group(backend="fake", store=FakeStore(), world_size=num_ranks, rank=0)
        return Ranks()

    devices.join_processes = join
    torch.distributed.new_group = lambda *_, **__: torch.distributed.group.WORLD
    devices.start_workers = lambda worker, *args: worker(*args)


def take_cudnn():
    """Lets Keras' recurrent layers call cuDNN's kernels, which torch does on a GPU."""
    import torch._VF as functions

    def calling(mode):
        def call(x, state, weights, biases, layers, dropout, train, bidirectional, batch_first):
            hidden, cell = state if isinstance(state, tuple) else (state, None)
            size = hidden.shape[-1], 0, layers, batch_first, dropout, train, bidirectional, [], None
            results = torch.ops.aten._cudnn_rnn(x, weights, 4, None, hidden, cell, mode, *size)
            return results[:3] if cell is not None else results[:2]

        return call

    functions.lstm, functions.gru = calling(2), calling(3)
    torch.backends.cudnn.is_available = lambda: True


def main():
    results = []
    for case in json.loads(sys.argv[1]):
        found, own = {}, {name: case.pop(name) for name in OWN if name in case}
        if case.pop("cudnn", False):
            take_cudnn()
        work = functools.partial(train, found, **own)
        if case.setdefault("num_devices", 1) > 1:
            be_first_of(case["num_devices"])
        found["results"] = kerasdp.launch(work, backend="torch", device=DEVICE, compile="on", verbose=0, **case)
        if case["num_devices"] > 1:
            torch.distributed.destroy_process_group()
        results.append(found)
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
