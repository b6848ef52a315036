"""recoup beside other methods on one CUDA GPU, in under ten minutes, without a network.

    python -m bench.gpu [workload ...] [--minutes 9] [--out bench/results]
    python -m bench.gpu --rehearse      # the same code with tiny models, on a CPU

For a Llama of a billion parameters (bfloat16, 4,096 tokens), ViT-L, ResNet-50 at a batch of 184 and a U-Net: plain,
every layer, every 2nd, SAC, the compiler's memory budget by layer, torch-remat where it can be imported, and recoup's
plans at 80, 60, 40 and 30 % of the plain peak and at the floor, with op costs measured on this device. Peak is
`max_memory_allocated`; time is wall clock between synchronisations, interleaved with plain. It also says how far the
measured op costs, added up, are from the plain step's time. Needs torch 2.11 or newer and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import recoup
from bench.gpu_models import WORKLOADS, Workload
from bench.gpu_report import write_report
from bench.measuring import metered, timed, to_host
from bench.methods import METHODS, Subject, memory_budget
from bench.peers import line, versions
from recoup.capture.step import Objective
from recoup.evidence.step_bench import StepBench
from recoup.ir.plan import Plan

BUDGETS = (80, 60, 40, 30)
TABLE_TOLERANCE = 0.10
_HAND_MADE = ("every layer", "every 2nd layer", "SAC, matmuls, attention, convolutions kept", "torch-remat")
_COMPILED = (0.5, 0.2)
Row = dict[str, Any]


def run(name: str, device: torch.device, *, small: bool, rounds: int, until: float, note: Callable[[Row], None]) -> Row:
    """Measures one workload, each row handed to `note` as it is done; returns what is said of the workload itself.

    Args:
        until: by `time.perf_counter`, when to leave out what is left; each row left out says so.
    """
    torch.manual_seed(0)
    workload = WORKLOADS[name](device, small=small)
    subject = Subject(model=workload.model, batch=workload.batch, loss=workload.loss, layers=workload.layers)
    bench = StepBench(workload.model, workload.batch, Objective(loss=workload.loss), None)
    bench.step()
    bench.restore()
    reference = to_host(bench.step(take=True))
    bench.restore()
    again = metered(bench, contextlib.nullcontext, reference, {})
    base = {"workload": name, "plain_bytes": again["peak_bytes"], "plain_flops": again["flops"]}
    plain_time = timed(bench, {"plain": contextlib.nullcontext, "same": contextlib.nullcontext}, rounds=rounds)
    seconds = plain_time["plain"]["seconds"]
    note(base | again | {"method": "plain"} | plain_time["same"] | _rate(workload, seconds))
    begun = time.perf_counter()
    frontier = recoup.frontier(workload.model, workload.batch, loss=workload.loss, device=device, num_points=2)
    bench.restore()
    planner = frontier.planner
    head = {
        "workload": name,
        "capture_and_costs_seconds": time.perf_counter() - begun,
        "cost_source": planner.priced.source,
        "table_seconds": planner.plain.step_seconds,
        "plain_seconds": seconds,
        "table_error": planner.plain.step_seconds / seconds - 1,
        "plain_runs_equal": again["exact"],
    }

    def ours(budget: int) -> tuple[Row, Plan | None]:
        """Plans for a budget (0: the floor), again for less while the device measures more."""
        target = budget
        for _ in range(3):
            try:
                plan = frontier.plan(target) if budget else frontier.points[0].plan
            except recoup.InfeasibleBudget as error:
                return {"why_not": str(error).split("\n")[0], "minimum_bytes": error.minimum_bytes}, None
            found: Row = metered(bench, lambda plan=plan: recoup.apply(workload.model, plan), reference, {})
            found |= {"predicted_bytes": plan.predicted.peak_bytes, "budget_bytes": budget or None}
            found |= {"predicted_time_ratio": 1 + plan.predicted.extra_time_ratio, "plan": plan.to_json()}
            over = found["peak_bytes"] - budget
            if not budget or over <= 0:
                break
            target -= over + budget // 500
        return found, plan

    def measure(method: str, prepare: Callable[[Subject], Any] | None, budget: int | None) -> None:
        row: Row = base | {"method": method}
        if time.perf_counter() > until:
            note(row | {"why_not": "left out: the time given to this run was used up"})
            return
        ways: dict[str, Any] = {"plain": contextlib.nullcontext}
        try:
            if prepare is not None:
                enter = prepare(subject)
                row |= metered(bench, enter, reference, {}, compiled="compiled" in method)
                ways["method"] = enter
                budget = row["peak_bytes"]
            assert budget is not None
            row["recoup"], plan = ours(budget)
            if plan is not None:
                ways["recoup"] = lambda: recoup.apply(workload.model, plan)
            found = timed(bench, ways, rounds=rounds)
        except Exception as error:  # out of memory, or whatever a peer may raise: its reason is the cell
            bench.restore()
            note(row | {"why_not": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
            return
        if "method" in found:
            row |= found["method"] | _rate(workload, found["method"]["seconds"])
        if "recoup" in found:
            row["recoup"] |= found["recoup"] | _rate(workload, found["recoup"]["seconds"])
        note(row)

    for percent in BUDGETS:
        measure(f"{percent}%", None, base["plain_bytes"] * percent // 100)
    measure("floor", None, 0)
    for method in _HAND_MADE:
        measure(method, METHODS[method], None)
    backend = "inductor" if device.type == "cuda" else "aot_eager_decomp_partition"
    for share in _COMPILED:
        measure(f"memory budget {share}, compiled layers", lambda s, a=share: memory_budget(s, a, backend), None)
    return head


def _rate(workload: Workload, seconds: float) -> Row:
    return {"items_per_second": workload.items / seconds, "unit": workload.unit}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns 0, or 1 if a plan is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny models on the CPU: tries the code, measures nothing"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="leave out rows that do not fit into this time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="bench/results")
    arguments = parser.parse_args(argv)
    unknown = [n for n in arguments.workloads if n not in WORKLOADS]
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if not arguments.rehearse and not torch.cuda.is_available():
        print(
            f"skipped: torch {torch.__version__} sees no CUDA GPU on this machine. `--rehearse` runs the same code "
            "with tiny models on the CPU.",
            file=sys.stderr,
        )
        return 0
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    kind = "rehearsal" if arguments.rehearse else torch.cuda.get_device_name().replace(" ", "-").lower()
    begun = time.perf_counter()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu-{kind}-{datetime.date.today().isoformat()}.json"
    names = arguments.workloads or list(WORKLOADS)
    data: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{kind}, {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": versions(),
        "rounds": arguments.rounds,
        "wall_seconds": {},
        "workloads": [],
        "rows": [],
    }

    def save() -> None:
        file.write_text(json.dumps(data, indent=1) + "\n")

    def note(row: Row) -> None:
        data["rows"].append(row)
        save()
        print(f"{time.perf_counter() - begun:6.0f} s  {line(row)}", flush=True)

    for number, name in enumerate(names, 1):
        started = time.perf_counter()
        until = begun + 60 * arguments.minutes * number / len(names)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                head = run(name, device, small=arguments.rehearse, rounds=arguments.rounds, until=until, note=note)
            data["workloads"].append(head)
        except torch.OutOfMemoryError as error:
            data["workloads"].append({"workload": name, "why_not": f"plain runs out of memory: {error}"[:200]})
        if device.type == "cuda":
            torch.cuda.empty_cache()
        data["wall_seconds"][name] = time.perf_counter() - started
        save()
    write_report(file)
    for head in data["workloads"]:
        error = head.get("table_error", math.nan)
        verdict = "within" if abs(error) <= TABLE_TOLERANCE else "NOT within"
        print(f"{head['workload']}: op costs added up are {100 * error:+.1f} % of the plain step, {verdict} 10 %")
    over = [
        r
        for r in data["rows"]
        if (o := r.get("recoup") or {}).get("budget_bytes") and o.get("peak_bytes", 0) > o["budget_bytes"]
    ]
    print(f"{len(over)} plans over their budget; {time.perf_counter() - begun:.0f} s; {file}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
