"""The public functions on four models: budgets held, gradients kept, plans as data, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jax
import recoup.jax
from recoup.errors import InfeasibleBudget, PlanMismatch, StepError, TargetError, UsageError
from recoup.jax.evidence import _largest
from tests.jax.models import STEPS, rnn, shape, transformer, values_of
from tests.thorough import cases


@pytest.mark.slow
def test_a_while_loop_stays_and_what_is_around_it_is_planned() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        top = jax.lax.stop_gradient(jnp.abs(x).max())
        x = x / jax.lax.while_loop(lambda s: s > 1.5, lambda s: s * 0.5, top + 2)
        for w in params:
            x = x + jnp.exp(jnp.tanh(x @ w))
        return x.mean()

    args = values_of(([shape(16, 16)] * 4, shape(64, 16)))
    leanest = recoup.jax.frontier(loss, *args, num_points=3).points[0]
    planned, plan = recoup.jax.fit(loss, *args, budget=int(leanest.peak_bytes * 1.05))
    assert plan.names
    assert "`while` loop of unit" in str(plan)
    assert f"{plan.compiled_temporary_bytes / 1024:.1f} KiB temporaries" in str(plan)
    for a, b in zip(*(jax.grad(f)(*args) for f in (loss, planned)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5)


def test_a_while_loop_over_weights_whose_result_takes_no_part_in_gradients_is_planned_around() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        z = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))[0]
        z = jax.lax.stop_gradient(z)
        for _ in range(4):
            z = jnp.tanh(z @ w)
        return jnp.mean(z**2)

    args = values_of((shape(16, 16), shape(64, 16)))
    planned, plan = recoup.jax.fit(loss, *args, budget="90%")
    assert plan.names or "run again" in str(plan)
    for a, b in zip(*(jax.grad(f)(*args) for f in (loss, planned)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5)


def _tanhs(params: Any, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return scale * x.sum()


def test_the_smallest_budget_has_a_name_and_arguments_have_theirs() -> None:
    args = values_of(([shape(16, 16)] * 4, shape(64, 16)))
    plan = recoup.jax.plan(_tanhs, *args, budget="min")
    least = recoup.jax.frontier(_tanhs, *args).points[0]
    assert plan.budget_bytes == plan.predicted.peak_bytes == least.peak_bytes
    planned = recoup.jax.apply(_tanhs, plan)
    assert planned(args[0], x=args[1]) == planned(*args) == _tanhs(*args)
    with pytest.raises(UsageError, match="scale can only be given by name"):
        planned(*args, scale=2.0)
    assert recoup.jax.plan(_tanhs, *args, budget="min", actions="recompute").segments == plan.segments
    with pytest.raises(UsageError, match="budget_text must be a text"):
        recoup.jax.JaxPlan.from_json({**plan.to_json(), "budget_text": 999})


def test_errors_are_of_what_is_no_number_too() -> None:
    one, nan, inf = jnp.ones(3), jnp.array([1, jnp.nan, 1]), jnp.array([1, jnp.inf, 1])
    for a, b in [(one, nan), (nan, one), (one, inf)]:
        assert _largest([one, a], [one, b]) == _largest([a, one], [b, one]) == float("inf")
    assert _largest([nan, inf], [nan, inf]) == 0
    assert _largest([one * 1j], [one * 2j]) == 1


def _leaves_equal(a: Any, b: Any) -> bool:
    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(STEPS, [name for name in STEPS if name != "unrolled transformer"]))
def test_a_fitted_step_holds_its_budget_and_its_gradients(name: str) -> None:
    step, args = STEPS[name]()
    planned, plan = recoup.jax.fit(step, *args, budget="70%")
    assert plan.predicted.peak_bytes <= plan.budget_bytes < plan.predicted.plain_peak_bytes
    values = values_of(args)
    evidence = recoup.jax.verify(step, plan, *values, eager=False)
    assert evidence.max_gradient_error <= evidence.error_bound, evidence
    assert evidence.temporary_bytes < evidence.baseline_temporary_bytes
    assert abs(evidence.temporary_bytes / evidence.predicted_temporary_bytes - 1) < 0.1, evidence
    # What is handed back is used as the step was.
    assert planned(*values) == pytest.approx(float(step(*values)), rel=1e-5)
    assert recoup.jax.JaxPlan.from_json(plan.to_json()) == plan
    assert "run again" in str(plan)


@pytest.mark.slow
def test_op_by_op_gradients_are_bit_equal() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = x + jax.nn.silu(jnp.exp(jnp.tanh(x @ w)))
        return x.mean()

    args = [shape(16, 16)] * 6, shape(64, 16)
    plan = recoup.jax.plan(loss, *args, budget="75%")
    assert plan.names
    evidence = recoup.jax.verify(loss, plan, *values_of(args), time_pairs=1)
    assert evidence.eager_gradients_equal and evidence.time_ratio, evidence
    assert "bit-equal to plain" in str(evidence)
    assert not recoup.jax.verify(loss, plan, *args).gradients_equal


def test_the_plain_step_fits_a_large_budget() -> None:
    step, args = rnn(steps=8)
    plan = recoup.jax.plan(step, *args, budget="1GiB")
    assert plan.predicted.recomputed_flops == 0
    assert plan.predicted.peak_bytes == plan.predicted.plain_peak_bytes
    values = values_of(args)
    planned = recoup.jax.apply(step, plan)
    assert _leaves_equal(jax.jit(jax.grad(planned))(*values), jax.jit(jax.grad(step))(*values))


@pytest.mark.slow
def test_budgets_trade_bytes_for_time_monotonically() -> None:
    curve = recoup.jax.frontier(*_called(rnn(steps=24)))
    peaks = [p.peak_bytes for p in curve.points]
    times = [p.step_seconds for p in curve.points]
    assert len(peaks) > 3
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert curve.points[-1].recomputed_flops == 0
    assert curve.plan(curve.points[0].peak_bytes).predicted.peak_bytes == peaks[0]
    assert "run twice" in str(curve)


def _called(step: Any) -> tuple[Any, ...]:
    loss, args = step
    return loss, *args


@pytest.mark.slow
def test_a_budget_below_the_floor_says_what_is_there() -> None:
    step, args = rnn(steps=8)
    with pytest.raises(InfeasibleBudget, match="smallest reachable peak of `loss`") as caught:
        recoup.jax.plan(step, *args, budget=1000)
    minimum = caught.value.minimum_bytes
    assert recoup.jax.plan(step, *args, budget=minimum).predicted.peak_bytes <= minimum


def test_names_of_the_user_are_the_names_of_a_plan() -> None:
    from jax.ad_checkpoint import checkpoint_name

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for i in range(12):
            x = checkpoint_name(jnp.tanh(x @ params[i]), f"mine{i}")
        return x.sum()

    plan = recoup.jax.plan(loss, [shape(32, 32)] * 12, shape(256, 32), budget="80%")
    assert any(name.startswith("mine") for name, _ in plan.names)


@pytest.mark.slow
def test_what_is_no_array_stays_as_it_is() -> None:
    def loss(params: Any, config: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        y = config["activation"](params["w"])
        for _ in range(12):
            y = jnp.sin(y @ params["w"]) if config["deep"] else y
        return y.sum(), {"mean": y.mean()}

    args = ({"w": jnp.ones((16, 16))}, {"activation": jnp.tanh, "deep": True})
    planned, _ = recoup.jax.fit(loss, *args, budget="95%", has_aux=True, confirm=False)
    gradient, aux = jax.grad(planned, has_aux=True)(*args)
    plain, plain_aux = jax.grad(loss, has_aux=True)(*args)
    assert _leaves_equal((gradient, aux), (plain, plain_aux))


def test_a_plan_for_other_shapes_is_refused() -> None:
    step, args = rnn(steps=8)
    planned, plan = recoup.jax.fit(step, *args, budget="80%")
    with pytest.raises(PlanMismatch, match="Plan again"):
        planned(*values_of(rnn(steps=9)[1]))
    with pytest.raises(PlanMismatch):
        recoup.jax.verify(transformer(scanned=True)[0], plan, *transformer(scanned=True)[1])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"budget": "lots"}, UsageError, "number of bytes"),
        ({"argnums": 5}, UsageError, "names no argument"),
        ({"argnums": 1}, UsageError, "can have a gradient"),
        ({"argnums": 1.5}, UsageError, "give a number"),
        ({"has_aux": True}, StepError, "a pair of it"),
        ({"device": "abacus"}, UsageError, "abacus"),
        ({"optimizer": 3}, UsageError, "optax"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    def loss(params: jax.Array, tokens: jax.Array) -> jax.Array:
        return params[tokens].sum()

    with pytest.raises(error, match=text):
        recoup.jax.plan(loss, shape(8), shape(4, dtype=jnp.int32), **{"budget": "50%", **change})


def test_a_step_that_is_no_loss_is_refused() -> None:
    with pytest.raises(StepError, match=r"floating scalar.*whole training step"):
        recoup.jax.plan(lambda x: x * 2, shape(4), budget="50%")
    with pytest.raises(StepError, match="complex64"):
        recoup.jax.plan(lambda x: x.sum() * 1j, shape(4), budget="50%")
    with pytest.raises(UsageError, match="cannot be called"):
        recoup.jax.plan(3, shape(4), budget="50%")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="No arguments"):
        recoup.jax.plan(lambda: 1.0, budget="50%")
    with pytest.raises(UsageError, match="is no recoup"):
        recoup.jax.apply(lambda x: x, None)  # type: ignore[arg-type]
    assert recoup.jax.plan(lambda x: jnp.float32(3), shape(4), budget="2KiB").predicted.recomputed_flops == 0
    with pytest.raises(StepError, match="fails on these arguments"):
        recoup.jax.plan(lambda x: x @ x, shape(4, 3), budget="50%")


def test_the_state_of_an_optimizer_counts() -> None:
    optax = pytest.importorskip("optax")
    step, args = rnn(steps=8)
    params = sum(4 * a.size for a in jax.tree.leaves(args[0]))
    plain = recoup.jax.profile(step, *args)
    adam = recoup.jax.profile(step, *args, optimizer=optax.adam(1e-3))
    assert adam.state_bytes == 2 * params + 4
    assert adam.peak_bytes == plain.peak_bytes + adam.state_bytes
    assert "saved for backward" in str(adam)


def test_no_torch_on_this_path() -> None:
    code = (
        "import sys, recoup.jax, jax, jax.numpy as jnp\n"
        "f = lambda w: jax.lax.fori_loop(0, 12, lambda i, x: jnp.tanh(x @ w), w).sum()\n"
        "recoup.jax.fit(f, jax.ShapeDtypeStruct((64, 64), jnp.float32), budget='70%')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_plans_a_function_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from recoup.cli.main import run
    from recoup.jax.targets import resolve

    file = tmp_path / "model.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(w, x):\n    for _ in range(6):\n        x = jnp.tanh(x @ w)\n    return x.sum()\n"
        "def small():\n"
        "    s = jax.ShapeDtypeStruct\n"
        "    return {'step': loss, 'args': (s((32, 32), jnp.float32), s((512, 32), jnp.float32))}\n"
        "def wrong():\n    return 3\n"
    )
    out = tmp_path / "plan.json"
    assert run(["plan", f"jax:{file}:small", "--budget", "90%", "--out", str(out), "-q"]) == 0
    assert "Plan for loss" in capsys.readouterr().out
    assert recoup.jax.JaxPlan.load(out).step_name == "loss"
    assert run(["profile", f"jax:{file}:small", "--json", "-q"]) == 0
    assert run(["plan", f"jax:{file}:small", "--budget", "1KiB", "-q"]) == 3
    assert run(["plan", f"jax:{file}:small", "--budget", "90%", "--batch", "3", "-q"]) == 2
    with pytest.raises(TargetError, match="returns int"):
        resolve(f"jax:{file}:wrong")
    with pytest.raises(TargetError, match="no function"):
        resolve(f"jax:{file}:absent")
