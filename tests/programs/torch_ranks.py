"""Exchanges tensors between two ranks of torch in the ways of a training step, and prints what each rank got.

python torch_ranks.py
"""

import copy
import gc
import os
import weakref

import numpy as np
from starting import printed

import kerasdp


def exchange(runner):
    import torch
    import torch.distributed as dist

    from kerasdp.backends.torch import collectives

    rank = runner.strategy.processes.rank
    gathered = {}
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
        own = (torch.arange(6).reshape(2, 3) + rank).to(dtype).t()  # not contiguous
        expected = [torch.empty_like(own.contiguous(), dtype=torch.uint8) for _ in range(2)]
        dist.all_gather(expected, own.contiguous().to(torch.uint8))
        received = collectives.gather_by_sockets(own)
        same = torch.equal(received.to(torch.uint8), torch.stack(expected))
        gathered[str(dtype)] = [collectives.fits_sockets(own), same, received.dtype == dtype, list(received.shape)]
    large = torch.full((2**14,), float(rank))
    gathered["large"] = [collectives.fits_sockets(large), collectives.gather_by_sockets(large).mean(1).tolist()]
    gathered["too large"] = collectives.fits_sockets(torch.zeros(2**14 + 1))
    gathered["empty"] = collectives.fits_sockets(torch.zeros(0))
    gc.disable()  # a step's gradients are to be freed without it
    buckets = {}
    for name, case in CASES.items():
        buckets[name], left = averaged(rank, *case)
        buckets[name]["is freed"] = left() is None
    gc.enable()
    scattered = {name: handed_out(runner, make) for name, make in VALUES.items()}
    found = {
        "gathered": gathered,
        "buckets": buckets,
        "scattered": scattered,
        "keys": [joined_with(key) for key in (b"known", b"of rank %d" % rank)],
    }
    found["statistics"] = [trained(runner, has_own) for has_own in (False, True)]
    # Inductor reads it when it is imported, which it may have been before: by the server of these tests.
    found["processes that compile"] = int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
    return runner.strategy.processes.all_gather_object(found)


def joined_with(key):
    """What a rank says of the others, with a key that all know, or that is its own."""
    from kerasdp.backends.torch.processes import GlooProcesses

    try:
        return GlooProcesses(key).num_processes
    except kerasdp.RunError as error:
        return str(error)


def trained(runner, has_own):
    """Losses of a net with batch norm, and in how many groups it has gathered something."""
    import keras

    from kerasdp.backends.torch import collectives
    from kerasdp.keras_compat.settings import set_seed

    groups, gather = set(), collectives.all_gather_stacked
    collectives.all_gather_stacked = lambda tensor, group=None: groups.add(group) or gather(tensor, group)
    set_seed(0)
    layers = [keras.Input((5,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    with runner.scope():
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    x = np.random.RandomState(0).rand(24, 5).astype("float32")
    strategy, make = runner.strategy, runner.strategy.step_functions

    def step_functions(*args):
        strategy.is_gpu = has_own  # but not when it trains
        try:
            return make(*args)
        finally:
            strategy.is_gpu = False

    strategy.step_functions = step_functions
    losses = runner.fit(model, x, x.sum(1), batch_size=7, epochs=3).history["loss"]
    strategy.step_functions, collectives.all_gather_stacked = make, gather
    return losses, len(groups), groups == {strategy.statistics_group}, strategy.statistics_group is not None


# Values that differ between the ranks: in one message, or in several.
VALUES = {
    "nothing": lambda rank: None,
    "an error": lambda rank: str(ValueError(rank)),
    "arrays": lambda rank: {
        "a": np.arange(10.0) + rank,
        "b": np.zeros((0, 3)),
        "c": np.asfortranarray(np.eye(3) * rank),
    },
    "strings": lambda rank: np.array(["a", "b" * rank], object),
    "many arrays": lambda rank: [np.full(300, rank + place) for place in range(1000)],
    "a large array": lambda rank: [np.full((200, 300, 5), rank), "x"],
    "a large text": lambda rank: ["x" * 2_000_000, np.arange(3) + rank, np.zeros(0)],
}


def is_same(one, other):
    """Whether two values are of the same types, with the same arrays."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    return type(one) is type(other) and one == other


def handed_out(runner, make):
    """Whether each rank gets its value eight times, which rank 0 changes when it has given it."""
    scatter, are_right = runner.strategy.processes.open_scatter(), []
    for number in range(8):
        values = [make(rank) for rank in range(2)]
        expected = copy.deepcopy(values[scatter.rank])
        value = scatter(values, number)
        are_right.append(is_same(value, expected))
        for array in values[1] if isinstance(values[1], list) else ():
            if isinstance(array, np.ndarray):
                array[...] = -1
    return are_right


# Bytes of a bucket, whether something is shared.
CASES = {
    "one bucket": (2**20, True),
    "many buckets": (8, True),
    "nothing shared": (2**20, False),
}


def averaged(rank, bucket_bytes, is_shared):
    """Gradients of three weights and of one that is not used, on inputs that differ between the ranks.

    Also a weak reference to what has sent them.
    """
    import torch

    from kerasdp.backends.torch import compiled_step

    compiled_step._BUCKET_BYTES = bucket_bytes
    weights = [torch.full(shape, 0.5, requires_grad=True) for shape in ((3,), (2, 3), (1,), (4,))]
    leaves = {id(weight): weight for weight in weights}
    buckets = compiled_step.GradientBuckets(2, set())
    buckets.register_hooks(leaves)
    x = torch.tensor([1.0, 2.0, 4.0]) * (1 + 2 * rank)
    loss = (weights[0] * x).sum() + (weights[1] * x).sum() * 2 + weights[2].sum() * x[0]
    own = torch.autograd.grad(loss, weights, allow_unused=True)
    shared = torch.tensor([1.0, 10.0]) * (rank + 1) if is_shared else None
    gradients, total = buckets.mean(own, weights, shared)
    found = {
        "gradients": [None if gradient is None else gradient.tolist() for gradient in gradients],
        "shared": None if total is None else total.tolist(),
        "exchanges": len(buckets.sent),
    }
    return found, weakref.ref(buckets)


if __name__ == "__main__":
    printed(exchange, "torch", 2)
