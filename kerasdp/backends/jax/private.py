"""Holds all private names of JAX in use."""

import functools

from jax._src import xla_bridge


def use_address_of_host(address: str) -> None:
    """Lets CPU devices of several processes exchange through the interface with this address.

    JAX 0.10.2: `make_cpu_client` gives Gloo no address, which then takes the one that the machine's name stands for:
    on many machines 127.0.1.1, where no other machine gets to, or that of another network. No public way; call before
    JAX starts.
    """
    module = xla_bridge._jax  # type: ignore[attr-defined]
    original = getattr(module.make_gloo_tcp_collectives, "func", module.make_gloo_tcp_collectives)
    module.make_gloo_tcp_collectives = functools.partial(original, hostname=address)
