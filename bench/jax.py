"""`recoup.jax` on four steps at 20 budgets each, beside the policies that come with JAX and random sets of names.

    python -m bench.jax [--budgets N] [--out FILE.json] [model ...]

Measured on a CPU, nothing timed but planning: the simulated peak, and the temporaries of the compiled step
(`--xla_disable_hlo_passes=cse_barrier_expander`); FLOPs that run twice, counted on the jaxprs of loss and gradients,
beside those of the best built-in policy and of the best of 50 random name sets that fit the same simulated bytes;
gradients beside the plain step's, op by op and jitted; CPU seconds and memory of planning a 32-layer decoder. What a
file holds already of other models is kept; beside it a page is written. Exit status 1 names what misses.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.jax import models

import jax
import recoup.jax
from recoup.jax.api import planner_for
from recoup.jax.compiled import compiled_bytes
from recoup.jax.flat import live_eqns
from recoup.jax.flops import eqn_flops
from recoup.jax.layout import Layout, Piece, Scan, Segment
from recoup.jax.planner import Planner
from recoup.jax.program import Program
from recoup.jax.simulate import simulate
from recoup.jax.trace import gradient_function, trace
from recoup.units import format_bytes

WITHIN = 0.10
_NOISE = 1e-3  # of a compiled step's temporaries: how the compiler aligns and packs them
NUM_SETS = 50
MODELS: dict[str, Callable[..., models.Step]] = {
    "scan transformer": functools.partial(models.transformer, scanned=True, layers=24),
    "unrolled transformer": functools.partial(models.transformer, scanned=False, layers=3),
    "cnn": functools.partial(models.cnn, blocks=4),
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


def _cost(name: str, step: Any, args: Any) -> Peer:
    traced = trace(step, args, 0, has_aux=False)
    jaxpr = jax.make_jaxpr(gradient_function(traced, traced.function))(*traced.avals)
    flops = sum(map(eqn_flops, live_eqns(jaxpr)))
    return Peer(name=name, temporary_bytes=simulate(jaxpr).temporary_bytes, flops=flops)


def policies(make: Callable[..., models.Step]) -> Iterator[Peer]:
    """Yields each policy around the whole step, and around each layer (step over time, block)."""
    for name, policy in POLICIES.items():
        wrap = functools.partial(jax.checkpoint, policy=policy)
        step, args = make()
        yield _cost(f"{name}, whole step", wrap(step), args)
        step, args = make(wrap=wrap)
        yield _cost(f"{name}, each layer", step, args)


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
        for first, last in itertools.pairwise(places):
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
        yield Peer(name=f"random set {number}", temporary_bytes=candidate.memory.temporary_bytes, flops=candidate.flops)


def measure(name: str, num_budgets: int, num_sets: int = NUM_SETS) -> dict[str, Any]:
    """Returns the row of one model: its budgets, each with what was planned, compiled and what others take there."""
    make = MODELS[name]
    step, args = make()
    planner = planner_for(step, args)
    floor, plain = planner.peak_bytes(planner.leanest()), planner.peak_bytes(planner.plain)
    others = [*policies(make), *random_sets(planner, planner.places, num_sets)]
    measured: dict[Layout, int] = {}
    budgets = []
    for i in range(num_budgets):
        budget = floor + (plain - floor) * i // (num_budgets - 1)
        found = planner.best(budget)
        assert found is not None, "the floor fits"
        if found.layout not in measured:
            measured[found.layout] = compiled_bytes(planner, found)
        fitting = [p for p in others if p.temporary_bytes + planner.fixed_bytes <= budget]
        row: dict[str, Any] = {
            "budget_bytes": budget,
            "simulated_bytes": planner.peak_bytes(found),
            "simulated_temporary_bytes": found.memory.temporary_bytes,
            "compiled_temporary_bytes": measured[found.layout],
            "recomputed_flops": found.flops - planner.plain.flops,
            "keeps_bits": found.layout not in planner.inexact,
        }
        for key, is_random in (("policy", False), ("random", True)):
            best = min(
                (p for p in fitting if p.name.startswith("random") == is_random), key=lambda p: p.flops, default=None
            )
            row[key] = best and {"name": best.name, "recomputed_flops": best.flops - planner.plain.flops}
        budgets.append(row)
    return {
        "model": name,
        "fixed_bytes": planner.fixed_bytes,
        "plain_flops": planner.plain.flops,
        "budgets": budgets,
        "gradients": _gradients(step, args),
    }


def _gradients(step: Any, args: Any) -> dict[str, Any]:
    """Returns the evidence of one plan: at three quarters of the plain peak, or the leanest that keeps all bits."""
    plan = recoup.jax.plan(step, *args, budget="75%")
    found = recoup.jax.verify(step, plan, *models.values_of(args)).to_json()
    keys = ("eager_gradients_equal", "gradients_equal", "max_eager_error", "max_gradient_error", "error_bound")
    return {key: found[key] for key in keys}


def decoder(kind: str, budget: str) -> dict[str, Any]:
    """Returns what planning a 32-layer 7B-shaped decoder takes: CPU seconds, and GiB of this process at its most."""
    step, args = models.transformer(
        scanned=kind == "scan", layers=32, batch=1, length=2048, width=4096, hidden=11008, heads=32, vocab=32000
    )
    begin = time.process_time()
    plan = recoup.jax.plan(step, *args, budget=budget)
    # In KiB, and this program's alone: `getrusage` counts what the process that started it had, too.
    peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return {
        "decoder": kind,
        "budget": budget,
        "cpu_seconds": round(time.process_time() - begin, 1),
        "process_gib": round(int(peak) / 2**20, 2),
        "peak_over_plain": round(plan.predicted.peak_bytes / plan.predicted.plain_peak_bytes, 3),
    }


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
            shrinks = last["compiled_temporary_bytes"] - b["compiled_temporary_bytes"]
            if grows > 0 and shrinks > _NOISE * last["compiled_temporary_bytes"]:
                yield (
                    f"{where}: compiled {last['compiled_temporary_bytes']} to {b['compiled_temporary_bytes']}, "
                    f"simulated {last['simulated_temporary_bytes']} to {b['simulated_temporary_bytes']}"
                )
        last = b
    gradients = row["gradients"]
    for key, error in (("eager_gradients_equal", "max_eager_error"), ("gradients_equal", "max_gradient_error")):
        if not gradients[key] and gradients[error] > gradients["error_bound"]:
            yield f"{row['model']}: {error} {gradients[error]:.1e}, plain runs are {gradients['error_bound']:.1e} apart"


def page(data: dict[str, Any]) -> str:
    """Returns the results as Markdown."""
    lines = [f"# recoup.jax, {data['date']}", "", data["machine"], "", *([data["note"], ""] if "note" in data else [])]
    lines += ["`python -m bench.jax`. FLOPs twice: in % of the plain step's loss and gradients.", ""]
    for row in data["models"].values():
        lines += [f"## {row['model']}", "", f"Arguments and outputs: {format_bytes(row['fixed_bytes'])}.", ""]
        lines += [
            "| budget | simulated peak | temporaries simulated | compiled | FLOPs twice | best policy | best random |"
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for b in row["budgets"]:
            ratio = b["compiled_temporary_bytes"] / b["simulated_temporary_bytes"]
            others = [
                f"{_percent(b[key], row)}, {b[key]['name']}" if b[key] else "none fits" for key in ("policy", "random")
            ]
            cells = (
                format_bytes(b["budget_bytes"]),
                format_bytes(b["simulated_bytes"]),
                format_bytes(b["simulated_temporary_bytes"]),
                f"{ratio:.3f} of it",
                _percent(b, row) + ("" if b["keeps_bits"] else ", sums in another order"),
                *others,
            )
            lines.append(f"| {' | '.join(cells)} |")
        g = row["gradients"]
        for name, equal, error in (
            ("op by op", "eager_gradients_equal", "max_eager_error"),
            ("jitted", "gradients_equal", "max_gradient_error"),
        ):
            found = "bit-equal" if g[equal] else f"{g[error]:.1e} apart; plain runs {g['error_bound']:.1e}"
            lines += ["", f"Gradients at 75 %, {name}: {found}."]
        lines += ["", *(f"- misses: {m}" for m in misses(row)), ""]
    lines += ["## Planning a 32-layer 7B-shaped decoder", ""]
    for d in data["decoders"]:
        lines.append(
            f"- {d['decoder']} at {d['budget']}: {d['cpu_seconds']} s of CPU, {d['process_gib']} GiB; "
            f"{100 * d['peak_over_plain']:.0f} % of plain"
        )
    return "\n".join(lines) + "\n"


def _percent(found: dict[str, Any], row: dict[str, Any]) -> str:
    return f"{100 * found['recomputed_flops'] / row['plain_flops']:.3f} %"


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if nothing misses, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}, decoder; all if none is named")
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan-decoder", nargs=2, metavar=("KIND", "BUDGET"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.plan_decoder:
        print(json.dumps(decoder(*chosen.plan_decoder)))
        return 0
    data: dict[str, Any] = {"models": {}, "decoders": []}
    if chosen.out is not None and chosen.out.exists():
        data = json.loads(chosen.out.read_text())
    data["date"] = time.strftime("%Y-%m-%d")
    data["machine"] = f"jax {jax.__version__}, Python {platform.python_version()}, {jax.default_backend()}"
    wrong = []
    for name in chosen.models or [*MODELS, "decoder"]:
        if name == "decoder":  # each in a process of its own, so that its memory is its own
            data["decoders"] = [
                json.loads(
                    subprocess.run(
                        [sys.executable, "-m", "bench.jax", "--plan-decoder", kind, budget],
                        check=True,
                        capture_output=True,
                    ).stdout
                )
                for kind, budget in itertools.product(("scan", "unrolled"), ("80%", "60%"))
            ]
            wrong += [
                f"{d}: over 20 s or 2 GiB" for d in data["decoders"] if d["cpu_seconds"] > 20 or d["process_gib"] > 2
            ]
        else:
            data["models"][name] = measure(name, chosen.budgets)
            wrong += misses(data["models"][name])
        if chosen.out is not None:
            chosen.out.write_text(json.dumps(data, indent=1) + "\n")
            chosen.out.with_suffix(".md").write_text(page(data))
    if chosen.out is None:
        print(page(data))
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
