"""The tiled head and loss beside the plain step: peaks, time, exactness; and the smallest reachable peak.

    python -m bench.tile [workload ...] [--out bench/results]

`rederive + tile` runs no layer twice. Peaks are metered by allocator events on real steps, everything counted; time is
the median of interleaved pairs of steps on one example, under an allocator that keeps its memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

from recoup.api import _planner
from recoup.capture.swap import untouched
from recoup.cli.allocator import keep_freed_memory
from recoup.engine.handle import apply_decisions
from recoup.evidence.memory import storage_bytes
from recoup.evidence.verify import _Bench, _time, verify_plan
from recoup.ir.plan import Decision
from recoup.planning import Candidate, Planner
from recoup.targets.resolve import resolve_target

_NO_DROP = "attn_pdrop=0.0,resid_pdrop=0.0,embd_pdrop=0.0"
WORKLOADS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (f"hf:gpt2?n_layer=12,n_embd=512,n_head=8,vocab_size=32000,{_NO_DROP}", {"batch": 4, "seq": 512}),
    "llama": (
        "hf:llama?num_hidden_layers=12,hidden_size=512,intermediate_size=1376,num_attention_heads=8,vocab_size=32000",
        {"batch": 4, "seq": 512},
    ),
    "llama-128k": (
        "hf:llama?num_hidden_layers=8,hidden_size=256,intermediate_size=688,num_attention_heads=4,vocab_size=128000",
        {"batch": 2, "seq": 512},
    ),
    "bert": (
        "hf:bert?num_hidden_layers=6,hidden_size=512,intermediate_size=2048,num_attention_heads=8,vocab_size=32000",
        {"batch": 4, "seq": 384},
    ),
    "t5": ("hf:t5?num_layers=4,d_model=384,d_ff=1024,num_heads=6,vocab_size=32000", {"batch": 4, "seq": 256}),
}
EVERYWHERE = Decision(path="", action="rederive")


def timed(name: str, decisions: tuple[Decision, ...]) -> tuple[float, float]:
    """Returns the time of a step over plain's, and its spread, for one example a step."""
    target, sizes = WORKLOADS[name]
    resolved = resolve_target(target, **{**sizes, "batch": 1})
    with untouched(resolved.model), apply_decisions(resolved.model, decisions):
        return _time(_Bench(resolved.model, resolved.batch, None, None), 60.0)


def measured(planner: Planner, candidate: Candidate, batch: Any) -> dict[str, Any]:
    """Returns what a plan of the candidate measures on the real model."""
    plan = planner.plan(candidate, budget_bytes=candidate.peak_bytes, budget_text="-", device="cpu")
    evidence = verify_plan(planner.spec.model, plan, batch, timed=False)
    assert evidence.baseline_peak_bytes is not None
    model = planner.spec.model
    held = storage_bytes([*model.parameters(), *model.buffers(), *batch.values()])
    return {
        "held_bytes": held,
        "share_beyond_held": (evidence.peak_bytes - held) / (evidence.baseline_peak_bytes - held),
        "plain_bytes": evidence.baseline_peak_bytes,
        "predicted_bytes": candidate.peak_bytes,
        "peak_bytes": evidence.peak_bytes,
        "share_of_plain": evidence.peak_bytes / evidence.baseline_peak_bytes,
        "time_ratio": None,
        "time_spread": None,
        "max_gradient_error": evidence.max_gradient_error,
        "loss_error": evidence.loss_error,
        "within_bound": evidence.values_hold,
        "recomputed_flops": candidate.recomputed_flops,
    }


def run(name: str) -> list[dict[str, Any]]:
    """Returns the rows of one workload."""
    target, sizes = WORKLOADS[name]
    torch.manual_seed(0)
    resolved = resolve_target(target, **sizes)
    model, batch = resolved.model, resolved.batch
    planner, _, _ = _planner(
        model, batch, loss=None, optimizer=None, device=None, actions=("rederive", "recompute", "tile"), cost=None
    )
    assert planner.tiled is not None, f"{name}: no head to tile was found"
    tile = planner.tiled.decision
    head = dataclasses.asdict(planner.tiled.head)
    rows: list[dict[str, Any]] = []
    without, _, _ = _planner(
        model, batch, loss=None, optimizer=None, device=None, actions=("rederive", "recompute"), cost=None
    )
    rows.append({"plan": "floor without tile", **measured(without, without.smallest(), batch)})
    smallest = planner.smallest()
    tokens = next((d.tile_tokens for d in smallest.decisions if d.action == "tile"), None)
    rows.append({"plan": "floor", "tile_tokens": tokens, **measured(planner, smallest, batch)})
    by_hand = {"rederive": (EVERYWHERE,), "tile": (tile,), "rederive + tile": (EVERYWHERE, tile)}
    for label, decisions in by_hand.items():
        rows.append({"plan": label, **measured(planner, planner.simulate(decisions), batch)})
    del model, batch, resolved, planner, without
    keep_freed_memory()
    for row in rows:
        if row["plan"] in by_hand:
            row["time_ratio"], row["time_spread"] = timed(name, by_hand[row["plan"]])
    return [{"workload": name, "head": head, **row} for row in rows]


def as_markdown(rows: list[dict[str, Any]], header: dict[str, str]) -> str:
    """Returns the table."""
    lines = ["# Tiled head and loss, measured", ""]
    lines += [f"- {key}: {value}" for key, value in header.items()]
    lines += [
        "",
        "Bytes in MiB, everything counted; *of the step*: measured over plain without parameters, buffers and batch, "
        "which are there whatever the plan; time over plain, one example a step; error: the largest of one gradient, "
        "relative. The floor is the smallest reachable peak.",
        "",
        "| workload | plan | plain | predicted | measured | of plain | of the step | time | error | GFLOP twice |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        mib = [f"{row[k] / 2**20:.1f}" for k in ("plain_bytes", "predicted_bytes", "peak_bytes")]
        time = "-" if row["time_ratio"] is None else f"{row['time_ratio']:.3f} +- {row['time_spread']:.3f}"
        lines.append(
            f"| {row['workload']} | {row['plan']} | {' | '.join(mib)} | {row['share_of_plain']:.3f} "
            f"| {row['share_beyond_held']:.3f} | {time} "
            f"| {row['max_gradient_error']:.1e} | {row['recomputed_flops'] / 1e9:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--out", default="bench/results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.workloads:
        rows += run(name)
        for row in rows:
            if row["workload"] == name:
                print(
                    name,
                    row["plan"],
                    f"{row['share_of_plain']:.3f} {row['share_beyond_held']:.3f}",
                    row["time_ratio"],
                    row["max_gradient_error"],
                )
    date = datetime.date.today().isoformat()
    header = {
        "date": date,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": str(torch.__version__),
        "command": f"python -m bench.tile {' '.join(options.workloads)}",
    }
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"tile-cpu-{date}.json").write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    (out / f"tile-cpu-{date}.md").write_text(as_markdown(rows, header))


if __name__ == "__main__":
    main()
