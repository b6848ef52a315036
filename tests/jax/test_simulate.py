"""The simulation beside what XLA allocates, on programs that show one rule each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import jax
from recoup.jax._jax import compiled
from recoup.jax.simulate import simulate
from tests.jax.models import shape

KIB = 1024
X, W = shape(64, 64), shape(64, 64)


def in_place(x: Any, w: Any) -> Any:
    return jnp.maximum(x @ w, 0) @ w  # one buffer: the maximum lies where the product was


def again(x: Any, w: Any) -> Any:
    y = x @ w
    z = jnp.maximum(y, 0)  # has a buffer for the product, and is run again in the sum, which reads y
    return (z @ w).sum() + (z + jnp.sin(x)).sum()


def dear(x: Any, w: Any) -> Any:
    y = jnp.exp(x @ w)  # is not run twice
    return ((y * 2) @ w).sum() + (y + jnp.sin(x)).sum()


def transposed(x: Any, w: Any) -> Any:
    g = jnp.sin(x).reshape(8, 8, 64)  # contracted over two dimensions: copied with the features first
    return jnp.einsum("bth,btw->hw", g, w.reshape(8, 8, 64))


def one_call(x: Any, w: Any) -> Any:
    return jnp.exp(x @ w).sum(-1)  # the library runs product, exp and sum: no buffer between


def one_call_below(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.exp(y - y.max(-1, keepdims=True)) @ w  # all of it


def no_kernel(x: Any, w: Any) -> Any:
    return (jnp.cbrt(x) + jnp.where(x > 0, w, 0)).sum(-1)


def too_small(x: Any, w: Any) -> Any:
    return jnp.exp(x[:32] @ w).sum(-1)


def loop(x: Any, w: Any) -> Any:
    y = (x @ w) @ w  # what the loop stacks is there before, filled with zeros
    _, stacked = jax.lax.scan(lambda c, row: (c + row, jnp.cbrt(c * row)), y[0], y)
    return (stacked @ w).sum(-1)


STEPS = [in_place, again, dear, transposed, one_call, one_call_below, no_kernel, too_small, loop]


@pytest.mark.parametrize("step", STEPS)
def test_a_program_takes_what_is_simulated(step: Callable[..., Any]) -> None:
    found = compiled(jax.jit(step), X, W).memory_analysis().temp_size_in_bytes
    assert abs(simulate(jax.make_jaxpr(step)(X, W)).temporary_bytes - found) <= KIB
