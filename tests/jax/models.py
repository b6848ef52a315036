"""Small JAX steps: (loss, arguments as shapes)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax

Step = tuple[Callable[..., Any], tuple[Any, ...]]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What is put around each layer, or step over time: `jax.checkpoint`, or nothing."""


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as it is."""
    return function


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def values_of(args: Any) -> Any:
    """Returns random arrays of these shapes."""
    draw = np.random.default_rng(0)

    def one(s: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.asarray(draw.normal(size=s.shape) * 0.1, s.dtype)
        return jnp.asarray(draw.integers(0, 5, size=s.shape), s.dtype)

    return jax.tree.map(one, args)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    log = jax.nn.log_softmax(logits, -1)
    return -jnp.mean(jnp.take_along_axis(log, targets[..., None], -1))


def layer(x: jax.Array, p: dict[str, jax.Array], heads: int = 4) -> jax.Array:
    batch, length, width = x.shape

    def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    qkv = (norm(x, p["n1"]) @ p["qkv"]).reshape(batch, length, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(width // heads)
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, length, width) @ p["o"]
    h = norm(x, p["n2"])
    return x + (jax.nn.silu(h @ p["g"]) * (h @ p["u"])) @ p["d"]


def layer_params(width: int, hidden: int, *stack: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "n1": shape(*stack, width),
        "n2": shape(*stack, width),
        "qkv": shape(*stack, width, 3 * width),
        "o": shape(*stack, width, width),
        "g": shape(*stack, width, hidden),
        "u": shape(*stack, width, hidden),
        "d": shape(*stack, hidden, width),
    }


def transformer(
    *,
    scanned: bool,
    layers: int = 4,
    batch: int = 4,
    length: int = 64,
    width: int = 64,
    vocab: int = 128,
    hidden: int = 0,
    heads: int = 4,
    wrap: Wrap = plain,
) -> Step:
    hidden = hidden or 4 * width
    stacked = layer_params(width, hidden, layers)
    each = [layer_params(width, hidden) for _ in range(layers)]
    params = {"emb": shape(vocab, width), "layers": stacked if scanned else each, "head": shape(width, vocab)}
    tokens = shape(batch, length, dtype=jnp.int32)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["emb"][batch[0]]
        if scanned:
            x, _ = jax.lax.scan(wrap(lambda x, p: (layer(x, p, heads), None)), x, params["layers"])
        else:
            for p in params["layers"]:
                x = wrap(functools.partial(layer, heads=heads))(x, p)
        return cross_entropy(x @ params["head"], batch[1])

    return loss, (params, (tokens, tokens))


def cnn(*, blocks: int = 4, batch: int = 8, size: int = 16, channels: int = 16, wrap: Wrap = plain) -> Step:
    block = {"c1": shape(3, 3, channels, channels), "g1": shape(channels)}
    block |= {"c2": shape(3, 3, channels, channels), "g2": shape(channels)}
    params = {"stem": shape(3, 3, 3, channels), "blocks": [block] * blocks, "head": shape(channels, 10)}

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
        x = x - x.mean((0, 1, 2))
        return x * jax.lax.rsqrt((x * x).mean((0, 1, 2)) + 1e-5) * gain

    def block_of(x: jax.Array, p: Any) -> jax.Array:
        h = jax.nn.relu(norm(conv(x, p["c1"]), p["g1"]))
        return jax.nn.relu(x + norm(conv(h, p["c2"]), p["g2"]))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = conv(batch[0], params["stem"])
        for p in params["blocks"]:
            x = wrap(block_of)(x, p)
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch[1])

    return loss, (params, (shape(batch, size, size, 3), shape(batch, dtype=jnp.int32)))


def rnn(*, steps: int = 48, batch: int = 8, width: int = 64, wrap: Wrap = plain) -> Step:
    params = {"wi": shape(32, 3 * width), "wh": shape(width, 3 * width), "b": shape(3 * width), "out": shape(width, 10)}

    def loss(params: Any, batch: Any) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            i_r, i_z, i_n = jnp.split(x @ params["wi"] + params["b"], 3, -1)
            h_r, h_z, h_n = jnp.split(h @ params["wh"], 3, -1)
            r, z = jax.nn.sigmoid(i_r + h_r), jax.nn.sigmoid(i_z + h_z)
            return (1 - z) * jnp.tanh(i_n + r * h_n) + z * h, None

        h, _ = jax.lax.scan(wrap(cell), jnp.zeros((batch[0].shape[1], width)), batch[0])
        return cross_entropy(h @ params["out"], batch[1])

    return loss, (params, (shape(steps, batch, 32), shape(batch, dtype=jnp.int32)))


STEPS: dict[str, Callable[[], Step]] = {
    "scan transformer": lambda: transformer(scanned=True),
    "unrolled transformer": lambda: transformer(scanned=False, layers=2),
    "cnn": lambda: cnn(blocks=3),
    "rnn": rnn,
}
