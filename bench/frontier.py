"""Held against every method by hand, at every budget: predicted time, the floor, and a curve that is monotone.

    python -m bench.frontier [workload ...] [--quick] [--out DIR] [--only table|curve]

Two parts for each workload. The *table* is prediction alone, by a roofline, so it is the same on any machine: at 90 %
of the plain peak and every 10 % below, down to the floor, the fastest plan of recoup beside the fastest method by hand
that fits, in one simulator (`by_hand.py`). The *curve* asks for 40 budgets and puts every plan under the allocator's
meter. A run that was interrupted goes on: parts in the JSON file are not run again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import recoup
from bench.by_hand import Method, by_engine, by_torch
from bench.frontier_report import markdown, violations
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.evidence.memory import measure_peak
from recoup.evidence.step_bench import StepBench
from recoup.ir.decision import Rederive, Tile
from recoup.planner.driver import Planner
from recoup.planner.incumbents import Candidate
from recoup.runtime.apply import apply_decisions
from recoup.targets.resolve import Target, resolve_target

DEVICE = "cpu-generic"
ACTIONS = ("rederive", "recompute")  # the bit-equal ones: no method by hand tiles
NUM_BUDGETS = 40
_TEXT = {"batch": 4, "seq": 128}
_FILE = "bench/frontier_models.py"
WORKLOADS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("hf:gpt2?n_layer=6,n_embd=256,n_head=4,vocab_size=2000", _TEXT),
    "llama": (
        "hf:llama?num_hidden_layers=6,hidden_size=256,intermediate_size=688,num_attention_heads=4,vocab_size=2000",
        _TEXT,
    ),
    "bert": (
        "hf:bert?num_hidden_layers=6,hidden_size=256,intermediate_size=1024,num_attention_heads=4,vocab_size=2000",
        _TEXT,
    ),
    "t5": ("hf:t5?num_layers=3,d_model=192,d_kv=48,num_heads=4,d_ff=768,vocab_size=2000", _TEXT),
    "vit": (
        "hf:vit?hidden_size=192,num_hidden_layers=6,num_attention_heads=3,intermediate_size=768",
        {"batch": 4, "image": 160},
    ),
    "resnet": (f"{_FILE}:resnet", {}),
    "unet": (f"{_FILE}:unet", {}),
    "unet3d": (f"{_FILE}:unet3d", {}),
    "mlp-chain": (f"{_FILE}:mlp_chain", {}),
    "vgg": (f"{_FILE}:vgg", {}),
    "experts": (f"{_FILE}:experts", {}),
    "lstm-loop": (f"{_FILE}:lstm_loop", {}),
}


def make_target(name: str) -> Target:
    """Returns the model and batch of a workload, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return resolve_target(WORKLOADS[name][0], **WORKLOADS[name][1])


def make_planner(name: str, device: str = DEVICE) -> Planner:
    """Returns the planner of a workload, priced by the roofline of `device`."""
    target = make_target(name)
    spec = StepSpec(model=target.model, batch=target.batch, objective=Objective(loss=target.loss))
    return Planner(spec, cost=RooflineCost(get_device(device)), actions=ACTIONS)


class Questions:
    """Asks a planner one budget after another, each answer as if it were the only one asked for.

    A planner remembers what it simulated and answers better for it; a user who calls `recoup.plan` twice has two.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._known: dict[Any, Candidate] = dict(planner.simulated)
        self._first = {k: c for k, c in self._known.items() if all(isinstance(d, Rederive | Tile) for d in k)}

    @contextmanager
    def _alone(self) -> Iterator[Planner]:
        planner, known = self._planner, self._known
        own = type(planner).simulate

        def simulate(chosen: Any) -> Candidate:
            if chosen in known:
                planner.simulated[chosen] = known[chosen]
            found = own(planner, chosen)
            known[chosen] = found
            return found

        before = planner.simulated
        planner.simulated = dict(self._first)
        # On the instance and for the duration only: what was simulated before is answered from memory.
        planner.simulate = simulate  # type: ignore[method-assign]
        try:
            yield planner
        finally:
            del planner.simulate  # type: ignore[method-assign]
            planner.simulated = before

    def fit(self, budget_bytes: int) -> Candidate | None:
        """Returns what `recoup.plan` would choose for the budget."""
        with self._alone() as planner:
            return planner.fit(budget_bytes)

    def smallest(self) -> Candidate:
        """Returns the plan with the smallest peak."""
        with self._alone() as planner:
            return planner.smallest()


def run_table(name: str, quick: bool) -> dict[str, Any]:
    """Returns recoup and the methods by hand at every budget, by simulation."""
    planner = make_planner(name)
    questions = Questions(planner)
    refused: list[str] = []
    methods = [*by_engine(planner), *by_torch(planner, refused)]
    smallest = questions.smallest()
    plain = planner.plain
    rows = []
    for share in range(90, 0, -40 if quick else -10):
        budget_bytes = plain.peak_bytes * share // 100
        if budget_bytes < min([smallest.peak_bytes, *(m.peak_bytes for m in methods)]):
            break
        rows.append(_row(questions, methods, plain, f"{share}%", budget_bytes))
    rows.append(_row(questions, methods, plain, "floor", smallest.peak_bytes))
    leanest = min(methods, key=lambda m: (m.peak_bytes, m.step_seconds))
    return {
        "cost_source": planner.priced.source,
        "capture": planner.trace.source,
        "plain_bytes": plain.peak_bytes,
        "plain_seconds": plain.step_seconds,
        "smallest_bytes": smallest.peak_bytes,
        "refused": refused,
        "smallest_by_hand": leanest.name,
        "smallest_by_hand_bytes": leanest.peak_bytes,
        "methods": [
            {
                "name": m.name,
                "peak_bytes": m.peak_bytes,
                "extra_seconds": m.step_seconds - plain.step_seconds,
                "recomputed_flops": m.recomputed_flops,
            }
            for m in methods
        ],
        "rows": rows,
    }


def _row(
    questions: Questions, methods: list[Method], plain: Candidate, budget: str, budget_bytes: int
) -> dict[str, Any]:
    found = questions.fit(budget_bytes)
    fitting = [m for m in methods if m.peak_bytes <= budget_bytes]
    best = min(fitting, key=lambda m: (m.step_seconds, m.recomputed_flops), default=None)
    row: dict[str, Any] = {"budget": budget, "budget_bytes": budget_bytes}
    if found is not None:
        row["recoup"] = {
            "peak_bytes": found.peak_bytes,
            "extra_seconds": found.step_seconds - plain.step_seconds,
            "recomputed_flops": found.recomputed_flops,
            "num_decisions": len(found.decisions),
        }
    if best is not None:
        row["by_hand"] = {
            "name": best.name,
            "peak_bytes": best.peak_bytes,
            "extra_seconds": best.step_seconds - plain.step_seconds,
            "recomputed_flops": best.recomputed_flops,
        }
    return row


def run_curve(name: str, quick: bool) -> dict[str, Any]:
    """Returns 40 budgets, each asked for alone, and the points of `recoup.frontier`, every plan metered."""
    target = make_target(name)
    model, batch = target.model, target.batch
    num_budgets = 8 if quick else NUM_BUDGETS
    curve = recoup.frontier(model, batch, loss=target.loss, actions=ACTIONS, num_points=num_budgets)
    planner = curve.planner
    questions = Questions(planner)
    bench = StepBench(model, batch, Objective(loss=target.loss), None)
    bench.step()  # what a first step allocates once
    metered: dict[Any, int] = {}

    def measured(decisions: Any) -> int:
        if decisions not in metered:
            bench.restore()
            with apply_decisions(model, decisions):
                metered[decisions] = measure_peak(bench.step, device=bench.device, held_bytes=bench.held_bytes())
            bench.restore()
        return metered[decisions]

    points = [
        {
            "predicted_bytes": p.peak_bytes,
            "measured_bytes": measured(p.plan.decisions),
            "step_seconds": p.step_seconds,
        }
        for p in curve.points
    ]
    low, high = curve.points[0].peak_bytes, planner.plain.peak_bytes
    alone = []
    for i in range(num_budgets):
        budget_bytes = low + (high - low) * i // (num_budgets - 1)
        found = questions.fit(budget_bytes)
        row: dict[str, Any] = {"budget_bytes": budget_bytes}
        if found is not None:
            row |= {
                "predicted_bytes": found.peak_bytes,
                "measured_bytes": measured(found.decisions),
                "step_seconds": found.step_seconds,
            }
        alone.append(row)
    return {"cost_source": planner.priced.source, "num_plans": len(metered), "points": points, "alone": alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--quick", action="store_true", help="two budgets and eight points a workload")
    parser.add_argument("--out", default="bench/results")
    parser.add_argument("--only", choices=("table", "curve"))
    arguments = parser.parse_args()
    date = datetime.date.today().isoformat()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"frontier-cpu-{date}.json"
    head = {
        "date": date,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": str(torch.__version__),
    }

    def done() -> dict[str, Any]:
        return dict(json.loads(file.read_text())["results"]) if file.exists() else {}

    for name in arguments.workloads or list(WORKLOADS):
        for part, run in (("table", run_table), ("curve", run_curve)):
            if part in done().get(name, {}) or arguments.only not in (None, part):
                continue
            began = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = run(name, arguments.quick)
                except recoup.RecoupError as error:  # a defect: the others go on, and this one is tried again
                    print(f"{name}, {part} FAILED: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
            results = done()  # as it is now: another process may have added to it
            results.setdefault(name, {"target": WORKLOADS[name][0], "options": WORKLOADS[name][1]})[part] = found
            results = {n: results[n] for n in WORKLOADS if n in results}
            file.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
            file.with_suffix(".md").write_text(markdown(head, results))
            print(f"{name}, {part}: {time.perf_counter() - began:.0f} s", flush=True)
            for line in violations(name, {part: found}):
                print(f"  {line}", flush=True)
    if file.exists():
        file.with_suffix(".md").write_text(markdown(head, done()))


if __name__ == "__main__":
    main()
