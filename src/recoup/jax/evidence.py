"""`verify`: a plan's step beside the plain one: gradients, compiled temporaries, time."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import jax
from recoup.evidence.noise import NOISE_FACTOR
from recoup.jax._jax import compiled
from recoup.jax.compiled import kept_for_backward
from recoup.jax.inspection import Residual
from recoup.jax.jax_plan import JaxPlan
from recoup.jax.rebuild import run
from recoup.jax.trace import gradient_function, trace
from recoup.jax.writing import check_fingerprint
from recoup.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JaxEvidence:
    """What was measured.

    Attributes:
        predicted_temporary_bytes, plain_temporary_bytes: simulated on the jaxpr, of the planned and the plain step.
        temporary_bytes, baseline_temporary_bytes: what the compiler allocates. compiler: which one, with which flags.
        predicted_saved_bytes: what forward keeps for backward, arguments left out, as planned.
        compiled_residuals: what the compiler's program keeps.
        peak_bytes: with arguments, outputs and the optimizer's state. budget_bytes: the plan's.
        loss_equal, gradients_equal: bit for bit, jitted; None where no values were given.
        eager_gradients_equal: bit for bit, each op dispatched alone (`jax.disable_jit`).
        loss_error, max_gradient_error, max_eager_error: largest difference over the largest plain value of an array.
        error_bound: the same between runs of the plain step that should agree: jitted, op by op, and with its loss
            times 1.1, where every rounding is another.
        time_ratio: planned over plain, median of pairs; None unless asked for.
    """

    predicted_temporary_bytes: int
    plain_temporary_bytes: int
    temporary_bytes: int
    baseline_temporary_bytes: int
    compiler: str
    predicted_saved_bytes: int
    compiled_residuals: tuple[Residual, ...]
    peak_bytes: int
    budget_bytes: int
    loss_equal: bool | None = None
    gradients_equal: bool | None = None
    eager_gradients_equal: bool | None = None
    loss_error: float = 0.0
    max_gradient_error: float = 0.0
    max_eager_error: float = 0.0
    error_bound: float = 0.0
    time_ratio: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """What the compiler's program keeps for backward."""
        return sum(r.nbytes for r in self.compiled_residuals)

    @property
    def within_budget(self) -> bool:
        """Whether the compiled step fits the plan's budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def is_ok(self) -> bool:
        """Whether it fits, and every gradient is plain's, up to what jit itself changes."""
        exact = self.gradients_equal is not False or self.max_gradient_error <= self.error_bound
        return self.within_budget and exact and self.max_eager_error <= self.error_bound

    @property
    def verdict(self) -> str:
        """One line: whether the plan holds, and if not, what does not."""
        if self.is_ok:
            compared = (
                "its gradients are plain's" if self.gradients_equal is not None else "no values were given to run"
            )
            return f"OK: compiled it fits its budget, {compared}"
        over = f"{format_bytes(self.peak_bytes)} compiled, budget {format_bytes(self.budget_bytes)}"
        return f"NOT OK: {'gradients differ' if self.within_budget else over}"

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {**dataclasses.asdict(self), "within_budget": self.within_budget, "is_ok": self.is_ok}

    def __str__(self) -> str:
        from recoup.jax.text import format_evidence

        return format_evidence(self)


def verify(
    step: Callable[..., Any],
    plan: JaxPlan,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    eager: bool = True,
    time_pairs: int = 0,
) -> JaxEvidence:
    """Runs the plain and the planned step's gradients and compiles both.

    Args:
        step: the loss function, not planned. plan: made for it. *args, argnums, has_aux: as for `recoup.jax.plan`;
            with `jax.ShapeDtypeStruct`s among them nothing runs, and only what is compiled is compared.
        eager: whether to compare op by op too, which takes long for long loops, and is left out where a plan offloads:
            memory spaces are jit's.
        time_pairs: how many pairs of jitted runs to time; 0: none.

    Raises:
        PlanMismatch: if the plan was made for another step.

    Example:
        >>> made = recoup.jax.plan(loss, x, budget="100%")
        >>> recoup.jax.verify(loss, made, x, eager=False).gradients_equal
        True
    """
    traced = trace(step, args, argnums, has_aux=has_aux)
    check_fingerprint(traced, plan)
    plain = gradient_function(traced, traced.function)
    planned = gradient_function(traced, lambda values: run(traced.program, plan.segments, values))
    scaled = gradient_function(traced, traced.function, scale=NOISE_FACTOR)
    arrays = traced.arrays_of(args)
    jitted = jax.jit(plain), jax.jit(planned)
    structs = [a if isinstance(a, jax.ShapeDtypeStruct) else _struct(a) for a in arrays]
    programs = [compiled(f, *structs) for f in jitted]
    baseline, found = (program.memory_analysis() for program in programs)
    others = plan.predicted.peak_bytes - plan.temporary_bytes
    is_cpu = jax.default_backend() == "cpu"
    flags = ", --xla_disable_hlo_passes=cse_barrier_expander" if is_cpu else ""
    evidence = JaxEvidence(
        predicted_temporary_bytes=plan.temporary_bytes,
        plain_temporary_bytes=plan.plain_temporary_bytes,
        temporary_bytes=int(found.temp_size_in_bytes),
        baseline_temporary_bytes=int(baseline.temp_size_in_bytes),
        compiler=f"XLA, {jax.default_backend()}{flags}",
        peak_bytes=others + int(found.temp_size_in_bytes),
        budget_bytes=plan.budget_bytes,
        predicted_saved_bytes=plan.predicted.saved_bytes,
        compiled_residuals=kept_for_backward(programs[1].as_text()),
        notes=(
            ("Without that flag XLA's CPU pipeline merges what runs again with its first run and saves nothing.",)
            if is_cpu and plan.temporary_bytes < plan.plain_temporary_bytes
            else ()
        ),
    )
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in arrays):
        return evidence
    offloads = any(part.offloaded for segment in plan.segments for part in segment.walk())
    return _with_values(
        evidence, jitted, (plain, planned, scaled), arrays, eager=eager and not offloads, time_pairs=time_pairs
    )


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(array, "sharding", None)
    is_sharded = len(getattr(sharding, "device_set", ())) > 1  # what lies on one device may go to where the others are
    return jax.ShapeDtypeStruct(
        np.shape(array), jax.dtypes.result_type(array), sharding=sharding if is_sharded else None
    )


def _with_values(
    evidence: JaxEvidence, jitted: Any, functions: Any, arrays: Any, *, eager: bool, time_pairs: int
) -> JaxEvidence:
    ((loss, _), gradients), ((planned_loss, _), planned) = (f(*arrays) for f in jitted)
    measured: dict[str, Any] = {
        "loss_equal": _error(loss, planned_loss) == 0,
        "loss_error": _error(loss, planned_loss),
        "gradients_equal": _largest(gradients, planned) == 0,
        "max_gradient_error": _largest(gradients, planned),
    }
    _, scaled = jax.jit(functions[2])(*arrays)
    measured["error_bound"] = _largest(gradients, [np.asarray(g) / NOISE_FACTOR for g in scaled])
    if eager:
        with jax.disable_jit():
            (_, eager_plain), (_, eager_planned) = (f(*arrays) for f in functions[:2])
        measured |= {
            "eager_gradients_equal": _largest(eager_plain, eager_planned) == 0,
            "max_eager_error": _largest(eager_plain, eager_planned),
            "error_bound": max(measured["error_bound"], _largest(eager_plain, gradients)),
        }
    if time_pairs:
        measured["time_ratio"] = statistics.median(
            _seconds(jitted[1], arrays) / _seconds(jitted[0], arrays) for _ in range(time_pairs)
        )
    return dataclasses.replace(evidence, **measured)


def _seconds(function: Any, arrays: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arrays))
    return time.perf_counter() - start


def _error(plain: Any, planned: Any) -> float:
    """Returns the largest difference over the largest finite plain value; nan equals nan, infinity if others differ."""
    arrays = np.asarray(plain), np.asarray(planned)
    wide = np.complex128 if any(np.issubdtype(array.dtype, np.complexfloating) for array in arrays) else np.float64
    a, b = (array.astype(wide) for array in arrays)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    largest = float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):  # infinity less infinity is no difference
        error = float(np.max(np.abs(np.where(same, 0.0, a - b)))) / largest
    return math.inf if math.isnan(error) else error


def _largest(plain: Sequence[Any], planned: Sequence[Any]) -> float:
    return max((_error(a, b) for a, b in zip(plain, planned, strict=True)), default=0.0)
