"""What planning costs, in CPU seconds: plans of workloads beside their plain step, of large models, of long chains.

    python -m bench.planning                       # the quick rows, minutes on one core
    python -m bench.planning ROW ... [--json FILE] # `--list` names the rows
    python -m bench.planning ROW --profile         # where the time goes, by function
    python -m bench.planning --page FILE.json      # as a page beside it
    python -m bench.planning --compare OLD.json NEW.json  # exit status 1 if a plan got worse by over 0.5 %

Each row runs in a process of its own, on one thread, after a plan of a tiny model (what a process imports once is not
the model's) and after this host's own costs are known (once for each machine: the row "host"). A workload's row has the
plain step, `plan` where no op of it was measured before, `plan` again (remembered), `fit`, and `fit` again; ratios are
over the plain step, `plan_ratio` that of the first. What was planned is in the file too: peak, seconds and FLOPs as
predicted by a roofline, which is the same on every machine, at 80 % and 50 % of the plain peak.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import recoup
from bench.lengths import make as make_lora
from bench.workloads import WORKLOADS
from recoup.capture.step import make_objective
from recoup.evidence.step_bench import StepBench
from recoup.planner.host_calibration import host_costs, measure_host_costs
from recoup.planner.request import planner_for
from recoup.solver.frontier import Solver
from recoup.targets.resolve import resolve_target

Row = dict[str, Any]
QUICK = ("host", "gpt2", "llama", "vit", "unet", "resnet50", "t5", "moe", "chain-200", "layers-80")
BUDGETS = ("80%", "50%")
_WORSE = 1.005


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU seconds that something takes, and what it returns."""
    begun = time.process_time()
    found = work()
    return round(time.process_time() - begun, 4), found


def _predicted(plan: recoup.Plan) -> Row:
    """Returns what a plan promises."""
    found = plan.predicted
    return {
        "peak_bytes": found.peak_bytes,
        "step_seconds": found.step_seconds,
        "recomputed_flops": found.recomputed_flops,
    }


def _workload(name: str) -> Row:
    torch.manual_seed(0)
    target = WORKLOADS[name].resolve()
    given: Any = {"loss": target.loss} if target.loss is not None else {}
    bench = StepBench(target.model, target.batch, make_objective(target.batch, **given)[0], None)
    bench.step()
    plain = min(_seconds(bench.step)[0] for _ in range(3))
    bench.restore()
    work = (target.model, target.batch)
    row: Row = {"plain_step": plain}
    row["plan_first"], _ = _seconds(lambda: recoup.plan(*work, budget=BUDGETS[0], **given))
    row["plan"], _ = _seconds(lambda: recoup.plan(*work, budget=BUDGETS[0], **given))
    row["fit"], fitted = _seconds(lambda: recoup.fit(*work, budget=BUDGETS[0], **given))
    fitted.applied.remove()
    row["fit_again"], fitted = _seconds(lambda: recoup.fit(*work, budget=BUDGETS[0], **given))
    fitted.applied.remove()
    row["plan_ratio"], row["fit_ratio"] = round(row["plan_first"] / plain, 1), round(row["fit"] / plain, 1)
    return row | {"plans": _plans(target.model, target.batch, given)}


def _plans(model: nn.Module, batch: Any, given: Any) -> Row:
    found = {}
    for budget in BUDGETS:
        try:
            made = recoup.plan(model, batch, budget=budget, device="cpu-generic", **given)
        except recoup.InfeasibleBudget:
            made = recoup.plan(model, batch, budget="min", device="cpu-generic", **given)
        found[budget] = _predicted(made)
    return found


def _chain(num: int) -> Row:
    """`num` x (Linear, ReLU) of width 64, batch 256."""
    model = nn.Sequential(*(m for _ in range(num) for m in (nn.Linear(64, 64), nn.ReLU())))
    batch = torch.randn(256, 64)
    seconds, made = _seconds(lambda: recoup.plan(model, batch, budget="50%", device="cpu-generic"))
    return {"plan": seconds, "plans": {"50%": _predicted(made)}}


def _llama(text: str, budget: str, **sizes: Any) -> Row:
    target = resolve_target(text, device="meta", **sizes)
    work = (target.model, target.batch)
    optimizer = torch.optim.AdamW if budget.endswith("GB") else None
    seconds, made = _seconds(lambda: recoup.plan(*work, budget=budget, device="a100-80gb", optimizer=optimizer))
    return {"plan": seconds, "plans": {budget: _predicted(made)}}


def _qlora(layers: int, tokens: int) -> Row:
    """Llama-3.1-8B with QLoRA, at a length that needs much to fit."""
    model, batch = make_lora("Llama-3.1-8B", "QLoRA", layers=layers, tokens=tokens)
    actions = ("rederive", "recompute", "offload", "tile", "tile-modules")
    seconds, made = _seconds(
        lambda: recoup.plan(
            model, batch, budget="24GB", device="h100-sxm", optimizer=torch.optim.AdamW, actions=actions
        )
    )
    return {"plan": seconds, "plans": {"24GB": _predicted(made)}}


def _layers(num: int) -> Row:
    """The solver alone, over the views of a step with so many equal layers."""
    sizes = f"num_hidden_layers={num},hidden_size=1024,num_attention_heads=8,intermediate_size=2816"
    target = resolve_target(f"hf:llama?{sizes}", device="meta", batch=1, seq=2048)
    objective, given = make_objective(target.batch)
    planner, _, _ = planner_for(
        target.model, given, objective=objective, optimizer=None, device="a100-80gb", actions=None, cost=None
    )
    row: Row = {}
    for view in planner.step.views.plain.views:
        seconds, _ = _seconds(lambda view=view: Solver(view.solver.problem).frontier(2))  # type: ignore[misc]
        row[view.name] = seconds
    return row


_WIDTHS = "hidden_size=8192,num_attention_heads=64,num_key_value_heads=8,intermediate_size=28672"
_LLAMA_70B = f"hf:llama?num_hidden_layers=80,{_WIDTHS}"
ROWS: dict[str, Callable[[], Row]] = {
    **{name: lambda name=name: _workload(name) for name in WORKLOADS},  # type: ignore[misc]
    "host": lambda: {"calibration": _seconds(measure_host_costs)[0]},
    "chain-200": lambda: _chain(200),
    "chain-1000": lambda: _chain(1000),
    "llama-7b": lambda: _llama("hf:llama", "80GB", batch=1, seq=8192, dtype="bfloat16"),
    "llama-7b-long": lambda: _llama("hf:llama", "80GB", batch=1, seq=32768, dtype="bfloat16"),
    "llama-70b": lambda: _llama(_LLAMA_70B, "70%", batch=1, seq=8192, dtype="bfloat16"),
    "qlora-8": lambda: _qlora(8, 65536),
    "qlora-32": lambda: _qlora(32, 65536),
    "layers-80": lambda: _layers(80),
}


def _run(name: str, profile: bool) -> Row:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    recoup.plan(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8), budget="100%", device="cpu-generic")
    host_costs()
    if not profile:
        return ROWS[name]()
    profiler = cProfile.Profile(time.process_time)
    row = profiler.runcall(ROWS[name])
    for order in ("cumulative", "tottime"):
        pstats.Stats(profiler, stream=sys.stderr).sort_stats(order).print_stats(70)
    return row


def _worse(old: dict[str, Row], new: dict[str, Row]) -> list[str]:
    """Returns what is worse in the plans of both: over its budget is, and slower."""
    found = []
    for name in sorted(old.keys() & new.keys()):
        for budget, before in old[name].get("plans", {}).items():
            after = new[name].get("plans", {}).get(budget)
            if after is None:
                continue
            ratio = after["step_seconds"] / before["step_seconds"]
            print(f"{name:12} {budget:5} seconds x{ratio:.4f}, peak x{after['peak_bytes'] / before['peak_bytes']:.4f}")
            if ratio > _WORSE:
                found.append(f"{name} at {budget}: {ratio:.4f} of the seconds")
    return found


def _about() -> Row:
    """Returns what a row was measured on; the load says how much to make of its seconds."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 1 thread",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load": round(os.getloadavg()[0], 1),
    }


def _page(rows: dict[str, Row]) -> str:
    """Returns the rows as a page: what planning took, and what it promised."""
    about = next(row["about"] for row in rows.values() if "about" in row)
    lines = [
        f"# Planning, {about['when'][:10]}\n",
        f"`python -m bench.planning`, {about['machine']}, {about['versions']}. Processor seconds, one process a row; "
        "`load` is the machine's when the row ended: with more than one job a core each instruction takes longer.\n",
        "| row | processor seconds | load | plans: peak MB, predicted step seconds, GFLOPs run twice |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        took = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("plans", "about"))
        plans = "; ".join(
            f"{budget}: {p['peak_bytes'] / 1e6:.1f}, {p['step_seconds']:.4f}, {p['recomputed_flops'] / 1e9:.3f}"
            for budget, p in row.get("plans", {}).items()
        )
        lines.append(f"| {name} | {took} | {row.get('about', {}).get('load', '')} | {plans} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints a line a row, and writes them where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="left out: the quick ones")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a row may take")
    parser.add_argument("--page", type=Path, metavar="FILE.json")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print(*ROWS)
        return
    if options.page:
        options.page.with_suffix(".md").write_text(_page(json.loads(options.page.read_text())))
        return
    if options.compare:
        old, new = (json.loads(path.read_text()) for path in options.compare)
        sys.exit("\n".join(_worse(old, new)) or None)
    if options.alone:
        print(json.dumps(_run(options.rows[0], options.profile)))
        return
    found: dict[str, Row] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for name in options.rows or QUICK:
        command = [sys.executable, "-m", "bench.planning", name, "--alone", *(["--profile"] if options.profile else [])]
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
            try:
                done = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, text=True, timeout=options.timeout, check=True
                )
                found[name] = json.loads(done.stdout.splitlines()[-1])
            except subprocess.TimeoutExpired:
                found[name] = {"why_not": f"not done in {options.timeout} s"}
            except subprocess.CalledProcessError as error:
                found[name] = {"why_not": f"exit status {error.returncode}"}
        print(name, " ".join(f"{k}={v}" for k, v in found[name].items() if k != "plans"), flush=True)
        found[name]["about"] = _about()
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
