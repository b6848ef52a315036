"""The main job's table: real models into byte budgets, predicted beside measured, against plans made by hand.

    python -m bench.main_job [workload ...] [--quick]

For every workload and budget: predicted and measured peak, exactness of the step, recomputed FLOPs of recoup and of the
best of {every block, every k-th block for any k, sqrt(n) segments} that fits the same budget, and the lowest reachable
peak beside that of torch.utils.checkpoint on every block, metered in the same run. Writes JSON and Markdown under
bench/results/, named by workload set, hardware and date; nothing in them is typed by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recoup import InfeasibleBudget
from recoup.capture.step import Objective
from recoup.evidence.memory import measure_peak
from recoup.evidence.step_bench import StepBench
from recoup.evidence.verify import verify_plan
from recoup.planner.driver import Planner, plan_for_budget
from recoup.planner.incumbents import Candidate
from recoup.planner.request import planner_for
from recoup.solver.baselines import baselines
from recoup.solver.decisions import to_decisions
from recoup.targets.resolve import resolve_target

BUDGETS = ("90%", "75%", "60%", "50%", "40%")
WORKLOADS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("hf:gpt2?n_layer=6,n_embd=512,n_head=8,vocab_size=16000", {"batch": 4, "seq": 384}),
    "llama": (
        "hf:llama?num_hidden_layers=8,hidden_size=512,intermediate_size=1376,num_attention_heads=8,vocab_size=16000",
        {"batch": 4, "seq": 384},
    ),
    "bert": (
        "hf:bert?num_hidden_layers=6,hidden_size=512,intermediate_size=2048,num_attention_heads=8,vocab_size=16000",
        {"batch": 4, "seq": 384},
    ),
    "vit": (
        "hf:vit?hidden_size=384,num_hidden_layers=12,num_attention_heads=6,intermediate_size=1536",
        {"batch": 8},
    ),
    "resnet": ("hf:resnet", {"batch": 8, "image": 160}),
    "unet": ("examples/unet.py", {}),
    "example-resnet": ("examples/resnet.py", {}),
    "mlp-chain": ("examples/mlp_chain.py", {}),
    "conv3d": ("examples/conv3d.py", {}),
    "llama-small": ("examples/llama_small.py", {}),
}


@contextlib.contextmanager
def every_block(model: nn.Module, paths: list[str]) -> Iterator[None]:
    """torch.utils.checkpoint on each of `paths`, as people do it by hand."""
    modules = dict(model.named_modules())
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    if cached is not None:
        config.use_cache = False
    for path in paths:
        module = modules[path]

        def run(*args: Any, _forward: Any = module.forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        module.forward = run
    try:
        yield
    finally:
        for path in paths:
            del modules[path].forward
        if cached is not None:
            config.use_cache = cached


def hand_made(planner: Planner) -> dict[str, Candidate]:
    """Simulates the baselines, all of them on the same engine."""
    found = {}
    line = planner.saving_view.solver.line
    for baseline in baselines(planner.saving_view.solver.problem):
        chosen = to_decisions(line, baseline.choice)
        found[baseline.name] = planner.simulate(chosen)
    return found


def run_workload(name: str, quick: bool) -> dict[str, Any]:
    """Returns the rows of one workload."""
    text, options = WORKLOADS[name]
    target = resolve_target(text, **options)
    model, batch = target.model, target.batch
    began = time.perf_counter()
    planner, device, _ = planner_for(
        model, batch, loss=target.loss, optimizer=None, device=None, actions=("rederive", "recompute"), cost=None
    )
    setup_seconds = time.perf_counter() - began
    by_hand = hand_made(planner)
    full = by_hand.get("full")
    rows = []
    for budget in BUDGETS[:2] if quick else BUDGETS:
        began = time.perf_counter()
        row: dict[str, Any] = {"budget": budget}
        try:
            plan, _ = plan_for_budget(planner, budget=budget, free_bytes=None, device=device)
        except InfeasibleBudget as error:
            row.update(infeasible=True, minimum_bytes=error.minimum_bytes)
            rows.append(row)
            continue
        row["plan_seconds"] = time.perf_counter() - began
        evidence = verify_plan(model, plan, batch, objective=Objective(loss=target.loss), timed=False)
        fitting = {n: c for n, c in by_hand.items() if c.peak_bytes <= plan.budget_bytes and c.decisions}
        best = min(fitting.items(), key=lambda item: item[1].recomputed_flops, default=None)
        row.update(
            budget_bytes=plan.budget_bytes,
            predicted_bytes=plan.predicted.peak_bytes,
            measured_bytes=evidence.peak_bytes,
            plain_bytes=evidence.baseline_peak_bytes,
            exact=evidence.gradients_equal and evidence.loss_equal and evidence.buffers_equal and evidence.rng_equal,
            differences=list(evidence.differences[:3]),
            extra_time_ratio=plan.predicted.extra_time_ratio,
            recomputed_flops=plan.predicted.recomputed_flops,
            best_by_hand=best[0] if best else None,
            best_by_hand_flops=best[1].recomputed_flops if best else None,
            num_decisions=len(plan.decisions),
        )
        rows.append(row)
    smallest = planner.smallest()
    blocks = sorted({d.path for d in full.decisions}) if full is not None else []
    bench = StepBench(model, batch, Objective(loss=target.loss), None)
    with every_block(model, blocks):
        bench.step()
        bench.restore()
        block_peak = measure_peak(bench.step, device=bench.device, held_bytes=bench.held_bytes())
    bench.restore()
    return {
        "workload": name,
        "target": text,
        "options": options,
        "setup_seconds": setup_seconds,
        "cost_source": planner.priced.source,
        "plain_predicted_bytes": planner.plain.peak_bytes,
        "smallest_peak_bytes": smallest.peak_bytes,
        "every_block_measured_bytes": block_peak,
        "blocks": len(blocks),
        "rows": rows,
    }


def markdown(results: list[dict[str, Any]], head: dict[str, str]) -> str:
    """Returns the table."""
    lines = ["# The main job, measured", "", *(f"- {k}: {v}" for k, v in head.items()), ""]
    lines += [
        "Bytes in MiB, everything counted. `exact`: loss, every gradient, buffers and random streams bit-equal to the"
        " plain step. FLOPs run twice in GFLOP; by hand: the best of every block, every k-th block and sqrt(n) segments"
        " that fits the same budget.",
        "",
        "| workload | budget | plain | allowed | predicted | measured | error | exact | +time (predicted) | run twice |"
        " by hand |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for row in result["rows"]:
            if row.get("infeasible"):
                least = row["minimum_bytes"] / 2**20
                lines.append(
                    f"| {result['workload']} | {row['budget']} | | | not reachable: floor {least:.0f} | | | | | | |"
                )
                continue
            error = row["predicted_bytes"] / row["measured_bytes"] - 1
            hand = "none fits"
            if row["best_by_hand"]:
                hand = f"{row['best_by_hand_flops'] / 1e9:.1f} ({row['best_by_hand']})"
            lines.append(
                f"| {result['workload']} | {row['budget']} | {row['plain_bytes'] / 2**20:.0f} "
                f"| {row['budget_bytes'] / 2**20:.0f} | {row['predicted_bytes'] / 2**20:.1f} "
                f"| {row['measured_bytes'] / 2**20:.1f} | {100 * error:+.2f} % | {'yes' if row['exact'] else 'NO'} "
                f"| {100 * row['extra_time_ratio']:+.1f} % | {row['recomputed_flops'] / 1e9:.1f} | {hand} |"
            )
    lines += ["", "| workload | floor of recoup | every block by torch.utils.checkpoint, metered |", "|---|---|---|"]
    for result in results:
        lines.append(
            f"| {result['workload']} | {result['smallest_peak_bytes'] / 2**20:.0f} "
            f"| {result['every_block_measured_bytes'] / 2**20:.0f} ({result['blocks']} blocks) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="bench/results")
    arguments = parser.parse_args()
    names = arguments.workloads or list(WORKLOADS)
    date = datetime.date.today().isoformat()
    head = {
        "date": date,
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": str(torch.__version__),
    }
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"main-job-cpu-{date}"
    results = []
    for name in names:
        print(f"... {name}", flush=True)
        results.append(run_workload(name, arguments.quick))
        stem.with_suffix(".json").write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results, head))
        print("\n".join(markdown(results[-1:], {}).splitlines()[7:]), flush=True)


if __name__ == "__main__":
    main()
