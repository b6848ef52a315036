"""Side by side: what people do by hand or by other tools, and recoup at the very same bytes, on one meter.

    python -m bench.peers [workload ...] [--method NAME ...] [--again | --replan | --retime | --recount] [--out FOLDER]

Each method's step is metered (allocator events, weights and batch included), its FLOPs counted and its gradients
compared with plain's. Then recoup is given the method's peak as its budget and measured the same way; a plan that
measures over its budget is made again for less, as `fit` does. In the end all methods and plans of a workload are timed
in turn, plain between them (CPU time, medians of ratios). A run that was interrupted goes on: rows in the JSON file are
not measured again unless `--again` says so, `--retime` times them, and `--recount` measures all but times.
Plans are kept in the file, so `--retime` and whoever reads it run the very same ones.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import recoup
from bench.measuring import Shapes, flops_by_shape, metered, timed, to_host
from bench.methods import METHODS, Subject
from bench.peers_report import write_report
from bench.points import has_plan
from bench.workloads import WORKLOADS
from recoup.capture.step import Objective
from recoup.cli.allocator import keep_freed_memory
from recoup.evidence.gradients import StepResult
from recoup.evidence.step_bench import StepBench
from recoup.ir.plan import Plan

BUDGETS = ("85%", "70%", "60%", "50%", "45%", "40%", "35%", "30%", "25%", "floor")  # recoup alone, to fill in its curve
_REPAIRS = 4
_REPAIR_MARGIN = 500  # a plan over its budget is made again for as much less and this part of the budget
Row = dict[str, Any]


class Session:
    """One workload under measurement."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name = name
        self.rounds = rounds
        torch.manual_seed(0)
        workload = WORKLOADS[name]
        self.target = workload.resolve()
        self.subject = Subject(
            model=self.target.model,
            batch=self.target.batch,
            loss=self.target.loss,
            layers=workload.find_layers(self.target.model),
        )
        self.bench = StepBench(self.target.model, self.target.batch, Objective(loss=self.target.loss), None)
        self.known: Shapes = flops_by_shape(self.bench)
        self.bench.restore()
        self.reference: StepResult = to_host(self.bench.step(take=True))
        self.plain = metered(self.bench, METHODS["plain"](self.subject), self.reference, self.known)
        self.methods: dict[str, Callable[[], Any]] = {}  # that are prepared
        self._frontier: recoup.api.Frontier | None = None

    @property
    def frontier(self) -> Any:
        """recoup's planner for the workload, captured once."""
        if self._frontier is None:
            self.bench.restore()
            self._frontier = recoup.frontier(self.target.model, self.target.batch, loss=self.target.loss, num_points=2)
            self.bench.restore()
        return self._frontier

    def measure(self, method: str, before: Row | None = None) -> Row:
        """Returns the row of one method, or of one budget for recoup alone.

        Args:
            before: a row whose plan is measured again, instead of making one.
        """
        row: Row = {"workload": self.name, "method": method, "plain_bytes": self.plain["peak_bytes"]}
        row["plain_flops"] = self.plain["flops"]
        compiled = "compiled" in method
        if method in METHODS:
            try:
                with torch.random.fork_rng():
                    begun = time.perf_counter()
                    enter = self.methods[method] = METHODS[method](self.subject)
                    row["prepared_seconds"] = time.perf_counter() - begun
                row |= metered(self.bench, enter, self.reference, self.known, compiled=compiled)
            except Exception as error:  # a peer may fail in any way: its reason is the cell
                self.bench.restore()
                said = " ".join(str(error).split())[:200]
                row["why_not"] = said if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {said}"
                return row
        if method != "plain":
            budget: int | str = row.get("peak_bytes", method)
            row["recoup"] = self.ours(budget, (before or {}).get("recoup") or {})
        return row

    def ours(self, budget: int | str, before: Row) -> Row:
        """Returns recoup's part of a row: the plan of `before` measured again, if it has one, or a new one."""
        try:
            if "plan" in before:
                return before | self.run(Plan.from_json(before["plan"]))
            return self.planned(budget)
        except Exception as error:  # a defect of recoup is a cell as well
            self.bench.restore()
            return {"why_not": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}

    def replan(self, row: Row) -> None:
        """Has recoup plan again for the bytes of a row that is there."""
        if row["method"] != "plain" and "why_not" not in row:
            row["recoup"] = self.ours(row.get("peak_bytes", row["method"]), {})

    def planned(self, budget: int | str) -> Row:
        """Returns recoup's plan for a budget in bytes, measured; made again for less while it measures above."""
        begun = time.perf_counter()
        plain_bytes = self.plain["peak_bytes"]
        if budget == "floor":
            plan = self.frontier.points[0].plan
            return self.run(plan) | {"planning_seconds": time.perf_counter() - begun, "budget_bytes": None}
        budget_bytes = plain_bytes * int(budget[:-1]) // 100 if isinstance(budget, str) else budget
        target = budget_bytes
        for _turn in range(_REPAIRS):
            try:
                plan = self.frontier.plan(target)
            except recoup.InfeasibleBudget as error:
                said = str(error).split("\n")[0]
                return {"why_not": said, "minimum_bytes": error.minimum_bytes, "budget_bytes": budget_bytes}
            planning_seconds = time.perf_counter() - begun
            found = self.run(plan) | {"budget_bytes": budget_bytes, "planning_seconds": planning_seconds}
            over = found["peak_bytes"] - budget_bytes
            if over <= 0:
                break
            target -= over + budget_bytes // _REPAIR_MARGIN
        return found | {"planned_again": _turn}

    def run(self, plan: Plan) -> Row:
        """Returns one plan's measurements and what it promised."""
        enter = self.entered(plan)
        return {
            **metered(self.bench, enter, self.reference, self.known),
            "predicted_bytes": plan.predicted.peak_bytes,
            "predicted_time_ratio": 1 + plan.predicted.extra_time_ratio,
            "cost_source": plan.predicted.cost_source,
            "plan": plan.to_json(),
        }

    def entered(self, plan: Plan) -> Callable[[], Any]:
        return lambda: recoup.apply(self.target.model, plan)

    def time(self, rows: Sequence[Row]) -> None:
        """Times the methods and plans of some rows, the same plan once, beside plain; writes it into the rows."""
        ways: dict[str, Callable[[], Any]] = {"": METHODS["plain"](self.subject)}
        targets: dict[str, list[Row]] = {}
        for row in rows:
            if "peak_bytes" in row:
                ways[row["method"]] = self.methods.get(row["method"]) or METHODS[row["method"]](self.subject)
                targets[row["method"]] = [row]
                if "compiled" in row["method"]:
                    for _ in range(2):
                        self.bench.restore()
                        with ways[row["method"]]():
                            self.bench.step()
            if has_plan(row):
                key = json.dumps(row["recoup"]["plan"]["decisions"], sort_keys=True)
                ways[key] = self.entered(Plan.from_json(row["recoup"]["plan"]))
                targets.setdefault(key, []).append(row["recoup"])
        if not targets:
            return
        found = timed(self.bench, ways, rounds=self.rounds)
        for row in rows:
            row |= {"plain_seconds": found[""]["seconds"], "rounds": self.rounds, "load": round(os.getloadavg()[0], 1)}
        for way, each in targets.items():
            for target in each:
                target |= found[way]


def line(row: Row) -> str:
    """Returns a row as it is printed while the benchmark runs."""

    def cell(found: Row | None) -> str:
        if found is None:
            return "-"
        if "peak_bytes" not in found:
            return str(found.get("why_not", "-"))[:110]
        return (
            f"{found['peak_bytes'] / row['plain_bytes']:.3f} bytes, {found['flops'] / row['plain_flops']:.3f} FLOPs, "
            f"{found.get('time_ratio', math.nan):.3f} time{'' if found['exact'] else ', NOT EQUAL'}"
        )

    return f"{row['workload']}, {row['method']}: {cell(row)} | recoup {cell(row.get('recoup'))}"


def versions() -> dict[str, str]:
    """Returns what was compared with what."""
    found = {"recoup": recoup.__version__, "torch": str(torch.__version__)}
    for package in ("transformers", "torch-remat", "ckptplan", "pulp", "pwlf"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def latest(folder: Path) -> Path:
    """Returns the newest file of results, or the name of today's."""
    files = sorted(folder.glob("peers-cpu-*.json"))
    return files[-1] if files else folder / f"peers-cpu-{datetime.date.today().isoformat()}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--method", action="append", help="only this row (may be given several times)")
    parser.add_argument("--quick", action="store_true", help="without what has to be compiled or solved by a MILP")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already")
    parser.add_argument("--same-plan", action="store_true", help="with --again: with the plans that are in the file")
    parser.add_argument("--replan", action="store_true", help="plan again for the rows that are there, and time them")
    parser.add_argument("--retime", action="store_true", help="only time the rows that are there, with their plans")
    parser.add_argument("--recount", action="store_true", help="measure rows and plans that are there; times stay")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="interleaved rounds of steps that a row is timed over; 0: bytes and FLOPs only",
    )
    parser.add_argument("--report", action="store_true", help="only write page and pictures from the file")
    parser.add_argument(
        "--out", default="bench/results", help="a folder; or a .json file, then without page and pictures"
    )
    arguments = parser.parse_args()
    unknown = [n for n in arguments.workloads if n not in WORKLOADS]
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    out = Path(arguments.out)
    file = out if out.suffix == ".json" else latest(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    if arguments.report:
        write_report(file)
        return
    keep_freed_memory()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": [], "wall_seconds": {}}
    rows: list[Row] = data["rows"]
    wall_seconds: dict[str, float] = data["wall_seconds"]
    head = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, 1 thread",
        "python": platform.python_version(),
        "versions": versions(),
        "command": " ".join(["python -m bench.peers", *sys.argv[1:]]),
    }
    if arguments.recount:
        arguments.rounds = 0
    if (
        arguments.replan or arguments.recount
    ) and not arguments.rounds:  # what is timed in the file is so on this machine at that time
        head["times_of"] = data.get("times_of") or {key: data[key] for key in ("date", "machine")}

    def save() -> None:
        order = {name: i for i, name in enumerate(WORKLOADS)}
        rows.sort(key=lambda r: order.get(r["workload"], len(order)))
        file.write_text(json.dumps({**head, "wall_seconds": wall_seconds, "rows": rows}, indent=1) + "\n")

    names = arguments.workloads or list(WORKLOADS)
    for number, name in enumerate(names, 1):
        wanted = [m for m in (*METHODS, *BUDGETS) if not arguments.method or m in arguments.method]
        if arguments.quick:
            wanted = [m for m in wanted if "compiled" not in m and "auto-SAC" not in m]
        known = {r["method"]: r for r in rows if r["workload"] == name}
        if arguments.retime or arguments.replan or arguments.recount:
            wanted = [m for m in wanted if m in known]
        elif not arguments.again:
            wanted = [m for m in wanted if m not in known]
        if not wanted:
            continue
        print(f"[{number}/{len(names)}] {name}: {len(wanted)} rows", flush=True)
        begun = time.perf_counter()
        session = Session(name, arguments.rounds)
        for method in wanted if not arguments.retime else ():
            if arguments.replan:
                row = known[method]
                session.replan(row)
            else:
                before = known.get(method) if arguments.same_plan or arguments.recount else None
                row = session.measure(method, before)
                if arguments.recount:
                    row = known[method] | row
                rows[:] = [r for r in rows if (r["workload"], r["method"]) != (name, method)] + [row]
            save()
            print(f"{time.perf_counter() - begun:6.0f} s  {line(row)}", flush=True)
        if session.rounds:
            timed_rows = [r for r in rows if r["workload"] == name and r["method"] in wanted and "why_not" not in r]
            session.time(timed_rows)
            for row in timed_rows:
                print(f"{time.perf_counter() - begun:6.0f} s  {line(row)}", flush=True)
        key = f"{name}, timed again" if arguments.retime else name
        wall_seconds[key] = wall_seconds.get(key, 0.0) * (not arguments.again) + time.perf_counter() - begun
        save()
        if out.suffix != ".json":
            write_report(file)
        print(f"[{number}/{len(names)}] {name} took {time.perf_counter() - begun:.0f} s", flush=True)


def _processor() -> str:
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
