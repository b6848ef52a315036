"""A recurrent net over time: the scan's steps in chunks that run again, and what the curve of bytes and time is."""

from __future__ import annotations

import jax.numpy as jnp

import jax
import recoup.jax


def loss(params: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
    """Returns the loss."""

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        gate = jax.nn.sigmoid(x @ params["gate"])
        return gate * h + (1 - gate) * jnp.tanh(x @ params["in"] + h @ params["state"]), None

    h, _ = jax.lax.scan(cell, jnp.zeros((xs.shape[1], params["state"].shape[0])), xs)
    return jnp.mean(h**2)


def main() -> None:
    """Plans the step, and shows that its gradients are the plain ones."""
    shape = jax.ShapeDtypeStruct
    params = {name: shape((32, 32), jnp.float32) for name in ("gate", "in", "state")}
    args = params, shape((64, 16, 32), jnp.float32)
    curve = recoup.jax.frontier(loss, *args, num_points=8)
    print(curve)
    values = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), args)
    print(recoup.jax.verify(loss, curve.points[0].plan, *values, eager=False))


if __name__ == "__main__":
    main()
