"""Rederive alone, no recompute: whole-step peak and saved bytes over plain, exactness, and work run twice by kind.

    python -m bench.rederive [workload ...] [--timed] [--out bench/results]

Peaks are metered by allocator events on real steps, parameters and batch excluded, fp32, one step each; `--timed` adds
interleaved pairs under an allocator that keeps its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recoup import rederive
from recoup.capture.capture import StepSpec, capture
from recoup.cli.allocator import keep_freed_memory
from recoup.cost.flops import kind
from recoup.engine.handle import apply_decisions
from recoup.evidence.memory import measure_peak
from recoup.evidence.verify import _Bench
from recoup.ir.plan import Decision
from recoup.targets.resolve import resolve_target

_TEXT = {"batch": 4, "seq": 512}
_NO_DROP = "attn_pdrop=0.0,resid_pdrop=0.0,embd_pdrop=0.0"
WORKLOADS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (f"hf:gpt2?n_layer=12,n_embd=512,n_head=8,vocab_size=32000,{_NO_DROP}", _TEXT),
    "gpt2-dropout": ("hf:gpt2?n_layer=12,n_embd=512,n_head=8,vocab_size=32000", _TEXT),
    "llama": (
        "hf:llama?num_hidden_layers=12,hidden_size=512,intermediate_size=1376,num_attention_heads=8,vocab_size=32000",
        _TEXT,
    ),
    "bert-dropout": (
        "hf:bert?num_hidden_layers=12,hidden_size=512,intermediate_size=2048,num_attention_heads=8,vocab_size=32000",
        _TEXT,
    ),
    "vit": (
        "hf:vit?hidden_size=384,num_hidden_layers=12,num_attention_heads=6,intermediate_size=1536",
        {"batch": 16},
    ),
    "resnet50": ("hf:resnet", {"batch": 16, "image": 160}),
    "unet": ("examples/unet.py", {}),
    "mlp-chain": ("examples/mlp_chain.py", {}),
}


def simulated(model: nn.Module, batch: Any, loss: Any, decisions: tuple[Decision, ...]) -> tuple[int, dict[str, int]]:
    """Returns the bytes saved for backward, and the step's FLOPs by kind of op."""
    with apply_decisions(model, decisions):
        trace = capture(StepSpec(model=model, batch=batch, loss=loss))
    forward = sum(1 for o in trace.ops if o.phase in ("forward", "loss"))
    saved = sum(s.nbytes for s in trace.storages if s.category == "saved" and s.alloc_op < forward <= s.free_op)
    flops: dict[str, int] = {}
    for op in trace.ops:
        signature = trace.signatures[op.signature]
        which = kind(signature.name)
        flops[which] = flops.get(which, 0) + signature.flops
    return saved, flops


def run_workload(name: str, timed: bool) -> dict[str, Any]:
    """Returns the row of one workload."""
    text, options = WORKLOADS[name]
    target = resolve_target(text, **options)
    model, batch = target.model, target.batch
    plain_saved, plain_flops = simulated(model, batch, target.loss, ())
    saved, flops = simulated(model, batch, target.loss, (Decision(path="", action="rederive"),))
    bench = _Bench(model, batch, target.loss, None)

    def step(context: Any) -> None:
        with context():
            bench.step()

    # `_Bench.step` runs backward too; rederive may be on there, its hooks matter in forward alone.
    peaks, results = {}, {}
    for label, context in (("plain", contextlib.nullcontext), ("rederive", rederive)):
        bench.restore()
        peaks[label] = measure_peak(lambda c=context: step(c), device=bench.device, held_bytes=0)
        bench.restore()
        with context():
            results[label] = bench.step(take=True)
    from recoup.evidence.gradients import compare

    comparison = compare(results["plain"], results["rederive"])
    del results
    row: dict[str, Any] = {
        "workload": name,
        "target": text,
        "plain_bytes": peaks["plain"],
        "rederive_bytes": peaks["rederive"],
        "peak_ratio": peaks["rederive"] / peaks["plain"],
        "saved_ratio": saved / plain_saved,
        "exact": not comparison.differences,
        "heavy_flops_equal": all(plain_flops[k] == flops[k] for k in plain_flops if k != "other"),
    }
    if timed:
        ratios = []
        for _ in range(5):
            seconds = []
            for context in (contextlib.nullcontext, rederive):
                bench.restore()
                begun = time.process_time()
                step(context)
                seconds.append(time.process_time() - begun)
            ratios.append(seconds[1] / seconds[0])
        row["cpu_time_ratio"] = statistics.median(ratios)
        row["cpu_time_ratios"] = sorted(ratios)
    bench.restore()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=[])
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--out", default="bench/results")
    arguments = parser.parse_args()
    keep_freed_memory()
    date = datetime.date.today().isoformat()
    head = {"date": date, "machine": platform.machine(), "torch": str(torch.__version__)}
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.workloads or list(WORKLOADS):
        row = run_workload(name, arguments.timed)
        rows.append(row)
        time_text = f", CPU time {row['cpu_time_ratio']:.3f}" if arguments.timed else ""
        print(
            f"{name}: peak {row['peak_ratio']:.3f} of plain's {row['plain_bytes'] / 2**20:.0f} MiB, saved "
            f"{row['saved_ratio']:.3f}, exact {row['exact']}, heavy FLOPs equal {row['heavy_flops_equal']}{time_text}",
            flush=True,
        )
        stem = folder / f"rederive-cpu-{date}"
        stem.with_suffix(".json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
        lines = [
            "# Rederive alone, measured",
            "",
            f"- date: {date}, torch {torch.__version__}, {torch.get_num_threads()} threads, fp32",
            "- whole-step peak by allocator events, parameters and batch excluded",
            "",
            "| workload | plain MiB | rederive / plain | saved bytes / plain | exact | heavy FLOPs equal | CPU time |",
            "|---|---|---|---|---|---|---|",
        ]
        for r in rows:
            timing = f"{r['cpu_time_ratio']:.3f}" if "cpu_time_ratio" in r else "not timed"
            lines.append(
                f"| {r['workload']} | {r['plain_bytes'] / 2**20:.0f} | {r['peak_ratio']:.3f} | {r['saved_ratio']:.3f} "
                f"| {'yes' if r['exact'] else 'NO'} | {'yes' if r['heavy_flops_equal'] else 'NO'} | {timing} |"
            )
        stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
