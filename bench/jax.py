"""`recoup.jax` on four steps at 20 budgets each, beside the policies that come with JAX and random sets of names.

    python -m bench.jax [model ...] [--budgets N] [--out FILE]

Measured, all of it on a CPU, nothing timed: the simulated peak, and the temporaries of the compiled step
(`--xla_disable_hlo_passes=cse_barrier_expander`); FLOPs that run twice, counted on the jaxprs of loss and gradients,
beside those of the best built-in policy and of the best of 50 random name sets that fit the same simulated bytes;
gradients beside the plain step's; CPU seconds and memory of planning a 32-layer decoder. Exit status 1 names what misses.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import recoup.jax
from recoup.jax._jax import compiled_memory
from recoup.jax.api import planner_for
from recoup.jax.flops import eqn_flops
from recoup.jax.layout import Layout, Piece, Scan, Segment
from recoup.jax.planner import Planner
from recoup.jax.program import Program
from recoup.jax.rebuild import run
from recoup.jax.simulate import live_eqns, simulate
from recoup.jax.trace import gradient_function, trace
from tests.jax import models

WITHIN = 0.10
NUM_SETS = 50
MODELS: dict[str, Callable[..., models.Step]] = {
    "scan transformer": functools.partial(models.transformer, scanned=True, layers=24),
    "unrolled transformer": functools.partial(models.transformer, scanned=False, layers=4),
    "cnn": functools.partial(models.cnn, blocks=6),
    "rnn": functools.partial(models.rnn, steps=64),
}
POLICIES: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way somebody else would run the step: its simulated temporaries and FLOPs."""

    name: str
    temporary_bytes: int
    flops: int


def _cost(planner: Planner, name: str, step: Any, args: Any) -> Peer:
    traced = trace(step, args, 0, has_aux=False)
    jaxpr = jax.make_jaxpr(gradient_function(traced, traced.function))(*traced.avals)
    flops = sum(map(eqn_flops, live_eqns(jaxpr)))
    return Peer(name=name, temporary_bytes=simulate(jaxpr).temporary_bytes, flops=flops)


def policies(planner: Planner, make: Callable[..., models.Step]) -> Iterator[Peer]:
    """Yields each policy around the whole step, and around each layer (step over time, block)."""
    for name, policy in POLICIES.items():
        wrap = functools.partial(jax.checkpoint, policy=policy)
        step, args = make()
        yield _cost(planner, f"{name}, whole step", wrap(step), args)
        step, args = make(wrap=wrap)
        yield _cost(planner, f"{name}, each layer", step, args)


def random_sets(planner: Planner, places: list[int], num_sets: int) -> Iterator[Peer]:
    """Yields random sets of held names: each value of each segment, or loop body, with a probability drawn once."""
    draw = random.Random(0)
    program = planner.step.program

    def held(of: Program, first: int, last: int, probability: float) -> tuple[str, ...]:
        values = [v for u in of.units[first:last] for v in u.outputs]
        return tuple(dict.fromkeys(of.name(v) for v in values if draw.random() < probability))

    for number in range(num_sets):
        probability = draw.random()
        found = []
        for first, last in zip(places, places[1:], strict=False):
            bodies = [u for u in range(first, last) if u in program.bodies]
            if bodies and last == first + 1:
                body = program.bodies[first]
                end = len(body.units)
                inside = Segment(first=0, last=end, recompute=True, held=held(body, 0, end, probability))
                steps = program.units[first].eqn.params["length"]
                scan = Scan(unit=first, pieces=(Piece(num_steps=steps, body=(inside,)),))
                found.append(Segment(first=first, last=last, scans=(scan,)))
            else:
                names = held(program, first, last, probability)
                found.append(Segment(first=first, last=last, recompute=True, held=names))
        candidate = planner.price(tuple(found))
        yield Peer(
            name=f"random set {number}", temporary_bytes=candidate.memory.temporary_bytes, flops=candidate.flops
        )


def _compiled_bytes(planner: Planner, layout: Layout) -> int:
    function = gradient_function(planner.step, lambda values: run(planner.step.program, layout, values))
    return int(compiled_memory(jax.jit(function), *planner.step.avals).temp_size_in_bytes)


def measure(name: str, num_budgets: int, num_sets: int = NUM_SETS) -> dict[str, Any]:
    """Returns the row of one model: its budgets, each with what was planned, compiled and what others take there."""
    make = MODELS[name]
    step, args = make()
    planner = planner_for(step, args)
    floor, plain = planner.peak_bytes(planner.leanest()), planner.peak_bytes(planner.plain)
    others = [*policies(planner, make), *random_sets(planner, planner.places, num_sets)]
    compiled: dict[Layout, int] = {}
    budgets = []
    for i in range(num_budgets):
        budget = floor + (plain - floor) * i // (num_budgets - 1)
        found = planner.best(budget)
        assert found is not None, "the floor fits"
        if found.layout not in compiled:
            compiled[found.layout] = _compiled_bytes(planner, found.layout)
        fitting = [p for p in others if p.temporary_bytes + planner.fixed_bytes <= budget]
        row: dict[str, Any] = {
            "budget_bytes": budget,
            "simulated_bytes": planner.peak_bytes(found),
            "simulated_temporary_bytes": found.memory.temporary_bytes,
            "compiled_temporary_bytes": compiled[found.layout],
            "recomputed_flops": found.flops - planner.plain.flops,
            "keeps_bits": found.layout not in planner.inexact,
        }
        for key, is_random in (("policy", False), ("random", True)):
            best = min(
                (p for p in fitting if p.name.startswith("random") == is_random), key=lambda p: p.flops, default=None
            )
            row[key] = best and {"name": best.name, "recomputed_flops": best.flops - planner.plain.flops}
        budgets.append(row)
    return {"model": name, "fixed_bytes": planner.fixed_bytes, "plain_flops": planner.plain.flops, "budgets": budgets}


def misses(row: dict[str, Any]) -> Iterator[str]:
    """Yields what one model's row misses, in words."""
    last: dict[str, Any] | None = None
    for b in row["budgets"]:
        where = f"{row['model']} at {b['budget_bytes']}"
        if b["simulated_bytes"] > b["budget_bytes"]:
            yield f"{where}: simulated {b['simulated_bytes']}"
        ratio = b["compiled_temporary_bytes"] / b["simulated_temporary_bytes"]
        if abs(ratio - 1) > WITHIN:
            yield f"{where}: compiled {b['compiled_temporary_bytes']}, {ratio:.2f} of simulated"
        for key in ("policy", "random"):
            if b[key] and b["recomputed_flops"] > b[key]["recomputed_flops"]:
                yield f"{where}: {b['recomputed_flops']} FLOPs twice, {b[key]['name']} {b[key]['recomputed_flops']}"
        if last is not None:
            if b["recomputed_flops"] > last["recomputed_flops"]:
                yield f"{where}: {b['recomputed_flops']} FLOPs twice, at a smaller budget {last['recomputed_flops']}"
            grows = b["simulated_temporary_bytes"] - last["simulated_temporary_bytes"]
            if grows * (b["compiled_temporary_bytes"] - last["compiled_temporary_bytes"]) < 0:
                yield (
                    f"{where}: compiled {last['compiled_temporary_bytes']} to {b['compiled_temporary_bytes']}, "
                    f"simulated {last['simulated_temporary_bytes']} to {b['simulated_temporary_bytes']}"
                )
        last = b


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['model']}: arguments and outputs {row['fixed_bytes']}, plain FLOPs {row['plain_flops']}")
    for b in row["budgets"]:
        ratio = b["compiled_temporary_bytes"] / b["simulated_temporary_bytes"]
        others = "  ".join(
            f"{key} {100 * b[key]['recomputed_flops'] / row['plain_flops']:.2f} ({b[key]['name']})" if b[key] else f"{key} -"
            for key in ("policy", "random")
        )
        print(
            f"  budget {b['budget_bytes']:>10}  simulated {b['simulated_bytes']:>10}  temporaries "
            f"{b['simulated_temporary_bytes']:>9}  compiled {ratio:.3f}  twice "
            f"{100 * b['recomputed_flops'] / row['plain_flops']:.2f} %  {'' if b['keeps_bits'] else 'other bits'}  {others}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--budgets", type=int, default=20)
    a = parser.parse_args()
    rows = []
    for name in a.models or MODELS:
        t = time.process_time()
        rows.append(measure(name, a.budgets))
        show(rows[-1])
        print("cpu", time.process_time() - t)
        for m in misses(rows[-1]):
            print("MISS", m)
    return 0


if __name__ == "__main__":
    sys.exit(main())
