"""A scan over layers, planned into 60 % of its memory. Needs: pip install "recoup[jax]"."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import jax
import recoup.jax


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns the loss."""

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, x, params)
    return jnp.mean(x**2)


def target() -> dict[str, Any]:
    """What `recoup plan jax:examples/jax_scan.py` reads: shapes only, nothing is allocated."""
    shape = jax.ShapeDtypeStruct
    params = {"up": shape((12, 64, 256), jnp.float32), "down": shape((12, 256, 64), jnp.float32)}
    return {"step": loss, "args": (params, shape((1024, 64), jnp.float32))}


def main() -> None:
    """Plans the step, and shows that its gradients are the plain ones."""
    step, args = target()["step"], target()["args"]
    planned, plan = recoup.jax.fit(step, *args, budget="60%")
    print(plan)
    values = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), args)
    plain, found = (jax.jit(jax.grad(f))(*values) for f in (step, planned))
    worst = max(
        float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True)
    )
    print(f"largest difference of a gradient: {worst:.1e}")


if __name__ == "__main__":
    main()
