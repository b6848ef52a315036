"""What the page takes from its reader: a loss of parameters and a batch."""

import jax.numpy as jnp

params = {"w": jnp.ones((64, 64))}
batch = jnp.ones((32, 64))


def loss(params, batch):
    """Returns a scalar."""
    return jnp.sin(batch @ params["w"]).mean()
