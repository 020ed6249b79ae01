"""The messages of a compiled training step on torch: of each kind, the bytes that a rank gives into it, summed."""

import collections
import functools
import sys

from starting import printed

from tests.programs import sharded


def train(runner, case):
    from kerasdp.backends.torch import compiled_step

    counts, bytes_of = collections.Counter(), collections.Counter()

    class Noted(compiled_step.CompiledTraining):
        def _captured(self, *args):
            graph, places = super()._captured(*args)
            for node in graph.graph.nodes:
                name = str(node.target).split(".")
                if "_c10d_functional" in name and "wait_tensor" not in name:
                    counts[name[1]] += 1
                    bytes_of[name[1]] += node.args[0].meta["val"].nbytes
            return graph, places

    compiled_step.CompiledTraining = Noted
    outcome = sharded.outcome(runner, case, 1)
    return {"counts": counts, "bytes": bytes_of, "weights": outcome["total"][0]}


if __name__ == "__main__":
    shard, case = sys.argv[1:]
    printed(functools.partial(train, case=case), "torch", 2, compile="on", shard=shard)
