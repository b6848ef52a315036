"""Planned steps where users have them: in a training step with an optimizer and donation, over devices, in linen."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest

import jax
import recoup.jax
from tests.jax.models import shape, values_of


def residual(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jnp.exp(jnp.tanh(x @ w))
    return x.mean()


ARGS = [shape(16, 16)] * 4, shape(128, 16)


@pytest.mark.slow
def test_a_training_step_with_donated_state_is_the_plain_one() -> None:
    optax = pytest.importorskip("optax")
    optimizer = optax.adamw(1e-2)
    planned, plan = recoup.jax.fit(residual, *ARGS, budget="75%", optimizer=optimizer)
    assert plan.predicted.recomputed_flops > 0

    def trained(loss: Any) -> list[Any]:
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, x)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        params, x = values_of(ARGS)
        state = optimizer.init(params)
        compiled = jax.jit(step, donate_argnums=(0, 1))
        for _ in range(3):
            params, state, value = compiled(params, state, x)
        return jax.tree.leaves((params, state, value))

    for a, b in zip(trained(residual), trained(planned), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_linen_network_with_skips_fits() -> None:
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):  # type: ignore[misc, name-defined]
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            wide = linen.relu(linen.GroupNorm(2)(linen.Conv(4, (3, 3))(x)))
            deep = linen.relu(linen.Conv(8, (3, 3))(linen.max_pool(wide, (2, 2), (2, 2))))
            up = linen.ConvTranspose(4, (2, 2), (2, 2))(deep)
            return linen.Conv(1, (1, 1))(linen.relu(linen.Conv(4, (3, 3))(jnp.concatenate([up, wide], -1))))

    net = Net()
    x = jnp.asarray(values_of(shape(2, 8, 8, 3)))
    params = net.init(jax.random.key(0), x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.square(net.apply(params, x)).mean()

    planned, plan = recoup.jax.fit(loss, params, x, budget="85%", confirm=False)
    assert plan.predicted.peak_bytes <= plan.budget_bytes < plan.predicted.plain_peak_bytes
    for a, b in zip(*(jax.tree.leaves(jax.jit(jax.grad(f))(params, x)) for f in (loss, planned)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_shards_on_several_devices_have_the_plain_gradients() -> None:
    code = """
import jax, jax.numpy as jnp, numpy as np, recoup.jax
from jax.sharding import NamedSharding, PartitionSpec
from tests.jax.models import values_of
from tests.jax.test_training import ARGS, residual
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
params, x = values_of(ARGS)
params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
planned, plan = recoup.jax.fit(residual, params, x, budget="80%")
assert plan.names or plan.predicted.recomputed_flops > 0
assert plan.predicted.peak_bytes < recoup.jax.profile(residual, *ARGS).peak_bytes
for a, b in zip(*(jax.jit(jax.grad(f))(params, x) for f in (residual, planned))):
    assert len(b.sharding.device_set) == 2 and np.allclose(a, b, rtol=1e-5, atol=1e-7)
"""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "XLA_FLAGS": flags})
