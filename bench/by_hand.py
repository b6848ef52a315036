"""torch's own activation checkpointing, applied by hand, priced by the simulator that prices recoup's plans.

Whole blocks (`torch.utils.checkpoint` on every k-th of them) and operator lists
(`create_selective_checkpoint_contexts`): attention kept, attention and every matmul and convolution kept, every second
matmul kept. Each method patches forwards for the duration of one captured step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bench.methods import wrapped
from recoup.capture.capture import capture
from recoup.cost.host_overhead import host_seconds
from recoup.errors import StepError
from recoup.ir.decision import Recompute
from recoup.ir.trace import Trace
from recoup.planner.driver import Planner
from recoup.selective.layers import find_layers
from recoup.solver.baselines import baselines
from recoup.solver.decisions import to_decisions

_ATEN = torch.ops.aten
_ATTENTION = {
    getattr(_ATEN, name).default
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
    if hasattr(_ATEN, name)
}
_MATMULS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
_HEAVY = {*_ATTENTION, *_MATMULS, _ATEN.convolution.default}
_PRODUCTS = {*_MATMULS, _ATEN.convolution.default}


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """What one method costs, by simulation.

    Attributes:
        recomputed_flops: FLOPs of the step above the plain step's.
    """

    name: str
    peak_bytes: int
    step_seconds: float
    recomputed_flops: int


def by_torch(planner: Planner, refused: list[str]) -> Iterator[Method]:
    """Yields every-k for all k, and the operator lists on every block and on every second, for each list of blocks.

    Args:
        refused: is given the names of methods with which torch does not run this step, and why.
    """
    for name, blocks, contexts in _named(planner):
        try:
            yield _simulate(planner, name, blocks, contexts)
        except StepError as error:
            refused.append(f"{name}: {' '.join(str(error).split())[:160]}")


def _named(planner: Planner) -> Iterator[tuple[str, list[str], Callable[[], Any] | None]]:
    for blocks in _block_lists(planner):
        where = "" if len(blocks) != 1 else " (one)"
        kind = type(planner.spec.model.get_submodule(blocks[0])).__name__
        for k in range(1, len(blocks) + 1):
            yield f"torch every-{k} {kind}{where}", blocks[::k], None
        for name, make in _POLICIES.items():
            for k in (1, 2) if len(blocks) > 1 else (1,):
                yield f"SAC {name}, every-{k} {kind}{where}", blocks[::k], make


def by_engine(planner: Planner) -> Iterator[Method]:
    """Yields full, every-k for all k and sqrt segments, run by recoup's own regions."""
    line = planner.saving_view.solver.line
    for baseline in baselines(planner.saving_view.solver.problem):
        chosen = to_decisions(line, baseline.choice)
        if chosen:
            found = planner.simulate(chosen)
            yield Method(baseline.name, found.peak_bytes, found.step_seconds, found.recomputed_flops)


def _block_lists(planner: Planner) -> list[list[str]]:
    """Returns the lists of modules people would call the blocks: recoup's repeated ones, and the largest list's."""
    found = []
    for baseline in baselines(planner.saving_view.solver.problem):
        if baseline.name == "full":
            chosen = to_decisions(planner.saving_view.solver.line, baseline.choice)
            found.append(list(dict.fromkeys(d.path for d in chosen if d.is_region)))
    layers = find_layers(planner.spec.model)
    if layers and layers not in found:
        found.append(layers)
    return [paths for paths in found if paths]


def _save_ops(ops: set[Any]) -> Callable[[], Any]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _every_second(ops: set[Any]) -> Callable[[], Any]:
    """Returns a context maker that keeps attention and every second of `ops`, counted in each region from its first."""

    def contexts() -> Any:
        counts = {True: 0, False: 0}

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in _ATTENTION:
                return CheckpointPolicy.MUST_SAVE
            if op not in ops:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


_POLICIES: dict[str, Callable[[], Any]] = {
    "attention": _save_ops(_ATTENTION),
    "attention+products": _save_ops(_HEAVY),
    "attention+every 2nd product": _every_second(_PRODUCTS),
}


def _simulate(planner: Planner, name: str, paths: Sequence[str], contexts: Callable[[], Any] | None) -> Method:
    """Simulates a method; its regions are charged the host time that recoup's are, by the same formula.

    Operator lists watch every op of a region's forward, as recoup does where a region keeps results.
    """
    model = planner.spec.model

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            # No random stream is kept: its 5 KB would count against the method, and fake tensors draw no numbers.
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            if contexts is not None:
                options["context_fn"] = contexts
            return checkpoint(forward, *args, **options, **kwargs)

        return run

    with wrapped(model, list(paths), wrap):
        priced = planner.cost.price(capture(planner.spec, known=planner.trace))
    if priced.trace.source != planner.trace.source:
        raise RuntimeError(f"{name}: captured from a {priced.trace.source} step ({priced.trace.reason})")
    found = planner.candidate((), priced)
    flops = sum(priced.trace.signatures[o.signature].flops for o in priced.trace.ops if o.phase != "optimizer")
    plain = sum(planner.trace.signatures[o.signature].flops for o in planner.trace.ops if o.phase != "optimizer")
    regions = [Recompute(path=path, keep=() if contexts is None else ("by list",)) for path in paths]
    costs = priced.host_costs
    host = sum(host_seconds(regions, priced.trace, plain=planner.trace, costs=costs))
    host += (_num_kernels(priced.trace) - _num_kernels(planner.trace)) * costs.replayed_op_seconds
    return Method(name, found.peak_bytes, found.step_seconds + host, flops - plain)


def _num_kernels(trace: Trace) -> int:
    return sum(o.phase != "optimizer" and not trace.signatures[o.signature].is_view for o in trace.ops)
