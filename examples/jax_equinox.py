"""An equinox model, planned: the whole model is the argument, its functions stay as they are."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp

import jax
import recoup.jax


class Layer(eqx.Module):
    """Attention, then an MLP, each behind a norm."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array) -> None:
        a, b = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=a)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, activation=jax.nn.gelu, key=b)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the output."""
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


def loss(layers: list[Layer], batch: jax.Array) -> jax.Array:
    """Returns the loss."""

    def one(x: jax.Array) -> jax.Array:
        for layer in layers:
            x = layer(x)
        return x

    return jnp.mean(jax.vmap(one)(batch) ** 2)


def main() -> None:
    """Plans the step, and shows that its gradients are the plain ones."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [Layer(32, key) for key in keys]
    batch = jax.random.normal(keys[0], (4, 32, 32))
    planned, plan = recoup.jax.fit(loss, layers, batch, budget="70%")
    print(plan)
    plain, found = (eqx.filter_jit(eqx.filter_grad(f))(layers, batch) for f in (loss, planned))
    leaves = zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True)
    print(f"largest difference of a gradient: {max(float(jnp.abs(a - b).max()) for a, b in leaves):.1e}")


if __name__ == "__main__":
    main()
