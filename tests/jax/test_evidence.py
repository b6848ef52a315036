"""What is shown of a plan: what the compiler keeps, the page, the commands; and values held in host memory."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jax
import recoup.jax
from recoup.errors import UsageError
from recoup.jax.compiled import kept_for_backward
from recoup.jax.options import offloaded
from tests.jax.models import shape, values_of

ARGS = [shape(16, 16)] * 4, shape(64, 16)


def chain(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jnp.exp(jnp.tanh(x @ w))
    return x.mean()


def test_evidence_says_what_the_compiler_keeps() -> None:
    plan = recoup.jax.plan(chain, *ARGS, budget="80%")
    evidence = recoup.jax.verify(chain, plan, *ARGS)
    assert 0 < evidence.saved_bytes <= evidence.temporary_bytes
    assert any(r.shape == "f32[64,16]" and "test_evidence.py" in r.source for r in evidence.compiled_residuals)
    assert "kept for backward by the compiler" in str(evidence)
    # A step whose backward reads one value of forward keeps that one alone.
    step = jax.jit(jax.value_and_grad(lambda x: jnp.tanh(x * 2).sum()))
    text = step.lower(shape(32, 8)).compile().as_text()
    assert sum(r.nbytes for r in kept_for_backward(text)) <= 4 * 32 * 8


def test_the_page_shows_a_plan_beside_the_step() -> None:
    plan = recoup.jax.plan(chain, *ARGS, budget="80%")
    page = recoup.jax.format_html(chain, *ARGS, plan=plan)
    for words in ("Kept for backward, as planned", "without a plan", "dot_general", "chain</h1>"):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert all(name in page for name, _ in plan.names)


@pytest.mark.slow
def test_the_commands_fit_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from recoup.cli.main import run

    file = tmp_path / "model.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(ws, x):\n    for w in ws:\n        x = x + jnp.exp(jnp.tanh(x @ w))\n    return x.sum()\n"
        "def target():\n"
        "    s = jax.ShapeDtypeStruct\n"
        "    return {'step': loss, 'args': ([s((16, 16), jnp.float32)] * 4, s((128, 16), jnp.float32))}\n"
    )
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    options = ["--budget", "85%", "--out", str(plan), "--html", str(page), "-q"]
    assert run(["fit", f"jax:{file}", *options]) == 0
    assert "OK: compiled it fits its budget" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert run(["verify", f"jax:{file}", "--plan", str(plan), "-q"]) == 0
    assert run(["verify", f"jax:{file}", "--plan", str(plan), "--batch", "3", "-q"]) == 2


def test_offloading_needs_a_device_that_says_what_it_takes() -> None:
    with pytest.raises(UsageError, match="no device is named"):
        recoup.jax.plan(chain, *ARGS, budget="80%", actions=("recompute", "offload"))
    with pytest.raises(UsageError, match="recompute, and offload"):
        recoup.jax.plan(chain, *ARGS, budget="80%", actions=("tile",))


@pytest.mark.slow
def test_what_is_dear_to_run_again_goes_to_the_host() -> None:
    def wide(params: Any, x: jax.Array) -> jax.Array:
        for w in params:  # dear for its bytes: every element is a long sum
            x = jnp.tanh(x @ w)
        return jnp.square(x.astype(jnp.float32)).mean()

    bf16 = functools.partial(shape, dtype=jnp.bfloat16)
    args = [bf16(65536, 65536)] * 4, bf16(262144, 65536)
    curves = [
        recoup.jax.frontier(wide, *args, num_points=6, device="h100-sxm", actions=actions)
        for actions in (("recompute",), ("recompute", "offload"))
    ]
    held = [part for p in curves[1].points for segment in p.plan.segments for part in segment.walk()]
    assert any(part.offloaded for part in held)
    floors = [(c.points[0].peak_bytes, c.points[0].step_seconds) for c in curves]
    assert floors[1] < floors[0]  # a lower floor, or the same in less time
    for point in curves[0].points[:-1]:
        both = curves[1].plan(point.peak_bytes)
        assert both.predicted.peak_bytes <= point.peak_bytes
        assert both.predicted.step_seconds <= point.step_seconds * (1 + 1e-9)
    assert "in host memory" in "".join(str(p.plan) for p in curves[1].points)


@pytest.mark.slow
def test_values_in_host_memory_give_the_same_gradients() -> None:
    points = recoup.jax.frontier(chain, *ARGS, num_points=4).points
    plan = next(p.plan for p in points if p.plan.names)
    moved = dataclasses.replace(plan, segments=tuple(map(offloaded, plan.segments)))
    assert any(part.offloaded for part in moved.segments)
    evidence = recoup.jax.verify(chain, moved, *values_of(ARGS))
    assert evidence.gradients_equal or evidence.max_gradient_error <= evidence.error_bound
    assert evidence.eager_gradients_equal is None
    kept = [recoup.jax.residuals(chain, *ARGS, plan=p) for p in (plan, moved)]
    assert sum(r.nbytes for r in kept[1]) < sum(r.nbytes for r in kept[0])


def sharded(mesh: Any) -> Any:
    """Returns `chain` over shards of its batch."""
    from jax.sharding import PartitionSpec

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(chain(params, x), "data")

    batch = PartitionSpec("data")
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(PartitionSpec(), batch), out_specs=PartitionSpec())
    return lambda params, x: mapped(params, x)


@pytest.mark.slow
def test_a_shard_map_is_planned_inside() -> None:
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    mesh = AbstractMesh((4,), ("data",))
    ws, x = ARGS
    batch = jax.ShapeDtypeStruct((256, 16), x.dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))
    found = recoup.jax.profile(sharded(mesh), ws, batch)
    on_one = recoup.jax.profile(chain, ws, shape(64, 16))
    assert found.argument_bytes == on_one.argument_bytes
    assert found.output_bytes == on_one.output_bytes
    assert on_one.temporary_bytes <= found.temporary_bytes < 2 * on_one.temporary_bytes
    plan = recoup.jax.plan(sharded(mesh), ws, batch, budget="70%")
    assert any(part.recompute for segment in plan.segments for part in segment.walk())
    assert plan.predicted.saved_bytes < plan.predicted.plain_saved_bytes <= found.temporary_bytes
    # The same mapped over a mesh that is here.
    here = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step, values = sharded(here), values_of(ARGS)
    planned, fitted = recoup.jax.fit(step, *values, budget="75%")
    assert any(part.recompute for segment in fitted.segments for part in segment.walk())
    assert fitted.compiled_temporary_bytes
    for a, b in zip(*(jax.jit(jax.grad(f))(*values) for f in (step, planned)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_bytes_are_those_on_one_device() -> None:
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    mesh = AbstractMesh((4,), ("data",))
    ws, x = ARGS
    sharded = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))
    on_four = recoup.jax.plan(chain, ws, sharded, budget="90%")
    on_one = recoup.jax.plan(chain, ws, shape(x.shape[0] // 4, x.shape[1]), budget="90%")
    assert on_four.predicted == on_one.predicted
    assert on_four.segments == on_one.segments
    assert "those on one device" in str(on_four)
    planned = recoup.jax.apply(chain, on_four)  # the plan is the whole step's
    assert jnp.isfinite(planned(*values_of(ARGS)))
