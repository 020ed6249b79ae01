"""Compiles attention, as a run on GPUs or TPUs sets Keras, for four of them; prints what came of it.

python attention_there.py tpu|cuda
"""

import json
import sys

import jax
import keras
import numpy as np
import targets
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kerasdp.backends.jax.devices import set_precision_of_products
from kerasdp.config import Config
from kerasdp.keras_compat.settings import set_attention

if __name__ == "__main__":
    platform = sys.argv[1]
    there = targets.devices_of(platform)
    set_precision_of_products("gpu", Config(precision="float32"))
    set_attention("tpu" if platform == "tpu" else "gpu")
    split = NamedSharding(Mesh(np.array(there), ("batch",)), PartitionSpec("batch"))
    found, here = {}, jax.devices
    for dtype in ("float32", "bfloat16"):
        layer = keras.layers.MultiHeadAttention(4, 128, dtype=dtype)
        layer.build((8, 128, 64), (8, 128, 64))
        weights = [variable.value for variable in layer.trainable_variables]

        def loss(x, layer=layer, weights=weights):
            return layer.stateless_call(weights, [], x, x)[0].astype("float32").sum()

        jax.devices = lambda *given: there if platform == "tpu" else here(*given)  # Keras asks what there is
        try:
            given = jax.ShapeDtypeStruct((8, 128, 64), dtype, sharding=split)
            jax.jit(jax.grad(loss)).lower(given).compile()
            found[dtype] = "compiled"
        except Exception as error:
            found[dtype] = f"{type(error).__name__}: {error}"[:200]
        finally:
            jax.devices = here
    print("RESULT " + json.dumps(found))
