"""A flax nnx convolutional net, planned: split into graph and state, the state differentiated."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

import jax
import recoup.jax


class Net(nnx.Module):
    """Convolutions with a skip each, then a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.blocks = nnx.List([nnx.Conv(16, 16, (3, 3), rngs=rngs) for _ in range(6)])
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the output."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return self.head(x.mean((1, 2)))


def main() -> None:
    """Plans the step, and shows that its gradients are the plain ones."""
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def loss(state: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, state)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    args = state, jnp.ones((8, 16, 16, 3)), jnp.zeros(8, jnp.int32)
    planned, plan = recoup.jax.fit(loss, *args, budget="70%", optimizer=optax.adam(1e-3))
    print(plan)
    plain, found = (jax.jit(jax.grad(f))(*args) for f in (loss, planned))
    leaves = zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True)
    print(f"largest difference of a gradient: {max(float(jnp.abs(a - b).max()) for a, b in leaves):.1e}")


if __name__ == "__main__":
    main()
