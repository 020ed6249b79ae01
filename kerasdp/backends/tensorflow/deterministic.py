"""TensorFlow: computes the same bits in each run, and refuses what cannot."""

import tensorflow as tf

from kerasdp.errors import UserError

# What TensorFlow (2.21) has no deterministic kernel for on GPUs. It says so in the first step, from within a graph.
_OPERATIONS = frozenset({
    "AdjustContrast", "AdjustContrastv2", "Bincount", "CropAndResizeGradBoxes", "CropAndResizeGradImage",
    "DenseBincount", "Dilation2DBackpropFilter", "Dilation2DBackpropInput", "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient", "MaxPoolGradWithArgmax", "ResizeNearestNeighborGrad",
    "SparseTensorDenseMatMul",
})  # fmt: skip
# Likewise, in functions that XLA compiles. For their sake Keras (3.15) then leaves XLA off for whole steps.
_COMPILED = frozenset({"MaxPool3DGrad", "MaxPoolGrad", "MaxPoolGradV2"})


def make_deterministic() -> None:
    """Lets TensorFlow and XLA use algorithms alone that give the same bits each time, until the process ends.

    What the kit itself compiles (batch norm, masks, an optimizer's update) XLA still does: TensorFlow (2.21) passes
    `xla_gpu_deterministic_ops` on to it.
    """
    tf.config.experimental.enable_op_determinism()


def require_deterministic(graph: tf.Graph) -> None:
    """Raises `UserError` if a graph, or a function that it calls, has operations that cannot on GPUs."""
    definition = graph.as_graph_def()
    parts = [(definition.node, False)]
    parts += [(each.node_def, each.attr["_XlaMustCompile"].b) for each in definition.library.function]
    for nodes, is_compiled in parts:
        for node in nodes:
            if node.op in _OPERATIONS or (is_compiled and node.op in _COMPILED):
                cure = "leave jit_compile out" if node.op in _COMPILED else "do without that operation"
                raise UserError(
                    f"--deterministic: {node.op} ({node.name}) has no deterministic implementation on GPUs; {cure}, "
                    "or leave --deterministic out"
                )
