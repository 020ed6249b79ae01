"""Compiles functions of many small JAX operations."""

from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of two arrays and two static arguments, even if the calling step is not compiled.

    Keras (3.15) does not compile models with layers such as `RandomTranslation`. In these models, one draw of random
    values took 45 ms without compilation. If the step itself is compiled, it contains the operations of the function
    directly.
    """
    return jax.jit(function, static_argnums=(2, 3), inline=True)
