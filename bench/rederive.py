"""Rederive alone, no recompute: whole-step peak and saved bytes over plain, exactness, and work run twice by kind.

    python -m bench.rederive [workload ...] [--timed] [--autocast] [--out bench/results]

Peaks are metered by allocator events on real steps, parameters and batch excluded, fp32 or, with `--autocast`, bf16
autocast around forward and loss; one step each. `--timed` adds interleaved pairs under an allocator that keeps its
memory, and the host's overhead on 24 tiny blocks beside that of torch's op-level selective checkpointing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recoup import rederive
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cli.allocator import keep_freed_memory
from recoup.cost.flops import kind
from recoup.evidence.memory import measure_peak
from recoup.evidence.step_bench import StepBench
from recoup.ir.decision import Decision, Rederive
from recoup.runtime.apply import apply_decisions
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
    "mlp-chain": ("bench/targets.py:mlp_chain", {}),
}


def simulated(model: nn.Module, batch: Any, loss: Any, decisions: tuple[Decision, ...]) -> tuple[int, dict[str, int]]:
    """Returns the bytes saved for backward, and the step's FLOPs by kind of op."""
    with apply_decisions(model, decisions):
        trace = capture(StepSpec(model=model, batch=batch, objective=Objective(loss=loss)))
    forward = sum(1 for o in trace.ops if o.phase in ("forward", "loss"))
    saved = sum(s.nbytes for s in trace.storages if s.category == "saved" and s.alloc_op < forward <= s.free_op)
    flops: dict[str, int] = {}
    for op in trace.ops:
        signature = trace.signatures[op.signature]
        which = kind(signature.name)
        flops[which] = flops.get(which, 0) + signature.flops
    return saved, flops


class Autocast(nn.Module):
    """The model under bf16 autocast, as a training loop would run it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args, **kwargs)


def run_workload(name: str, timed: bool, autocast: bool) -> dict[str, Any]:
    """Returns the row of one workload."""
    text, options = WORKLOADS[name]
    target = resolve_target(text, **options)
    model, batch = target.model, target.batch
    if autocast:
        model = Autocast(model)
    plain_saved, plain_flops = simulated(model, batch, target.loss, ())
    saved, flops = simulated(model, batch, target.loss, (Rederive(path=""),))
    bench = StepBench(model, batch, Objective(loss=target.loss), None)

    def planned() -> Any:
        return apply_decisions(model, (Rederive(path=""),))

    def step(context: Any) -> None:
        with context():
            bench.step()

    peaks, results = {}, {}
    for label, context in (("plain", contextlib.nullcontext), ("rederive", planned)):
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
        "dtype": "bf16 autocast" if autocast else "fp32",
        "target": text,
        "plain_bytes": peaks["plain"],
        "rederive_bytes": peaks["rederive"],
        "peak_ratio": peaks["rederive"] / peaks["plain"],
        "saved_ratio": saved / plain_saved,
        "exact": not comparison.differences,
        "heavy_flops_equal": all(plain_flops[k] == flops[k] for k in plain_flops if k != "other"),
    }
    if timed:
        ratios, noise = [], []
        for turn in range(9):
            seconds = {}
            order = [contextlib.nullcontext, planned] if turn % 2 else [planned, contextlib.nullcontext]
            for context in [*order, "again"]:
                bench.restore()
                begun = time.process_time()
                step(contextlib.nullcontext if context == "again" else context)
                seconds[context] = time.process_time() - begun
            ratios.append(seconds[planned] / seconds[contextlib.nullcontext])
            noise.append(seconds["again"] / seconds[contextlib.nullcontext])
        row["cpu_time_ratio"] = statistics.median(ratios)
        row["cpu_time_ratios"] = sorted(ratios)
        row["plain_over_plain"] = sorted(noise)
    bench.restore()
    return row


def host_overhead() -> dict[str, Any]:
    """Returns milliseconds of a step of 24 tiny blocks: plain, rederive, op-level selective checkpointing."""
    torch.set_num_threads(1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    blocks = nn.Sequential(*(Block() for _ in range(24)))
    x = torch.randn(4, 8, 16)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def plain() -> None:
        blocks(x).sum().backward()

    def rederived() -> None:
        with rederive():
            loss = blocks(x).sum()
        loss.backward()

    def selective() -> None:
        hidden = x
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
        hidden.sum().backward()

    seconds: dict[str, list[float]] = {"plain": [], "rederived": [], "selective": []}
    for _ in range(40):
        for step in (plain, rederived, selective):
            blocks.zero_grad()
            begun = time.perf_counter()
            step()
            seconds[step.__name__].append(time.perf_counter() - begun)
    best = {name: min(values) * 1e3 for name, values in seconds.items()}
    share = (best["rederived"] - best["plain"]) / (best["selective"] - best["plain"])
    return {**best, "overhead_over_selective": share}


def report(head: dict[str, Any], rows: list[dict[str, Any]], overhead: dict[str, Any] | None) -> str:
    """Returns the Markdown page."""
    lines = [
        "# Rederive alone, measured",
        "",
        f"- date: {head['date']}, torch {head['torch']}, {head['threads']} threads",
        "- whole-step peak by allocator events, parameters and batch excluded, and saved bytes, both over plain's; CPU",
        "  time: median of nine interleaved pairs over plain; noise: the middle half of plain over plain",
        "",
        "| workload | | plain, MiB | peak | saved bytes | exact | heavy FLOPs equal | CPU time | noise |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        timing, noise = "not timed", ""
        if "cpu_time_ratio" in r:
            timing = f"{r['cpu_time_ratio']:.3f}"
            noise = f"{r['plain_over_plain'][2]:.3f}-{r['plain_over_plain'][-3]:.3f}"
        lines.append(
            f"| {r['workload']} | {r['dtype']} | {r['plain_bytes'] / 2**20:.0f} | {r['peak_ratio']:.3f} | "
            f"{r['saved_ratio']:.3f} | {'yes' if r['exact'] else 'NO'} | "
            f"{'yes' if r['heavy_flops_equal'] else 'NO'} | {timing} | {noise} |"
        )
    if overhead is not None:
        lines += [
            "",
            f"24 tiny blocks, best of 40 steps: plain {overhead['plain']:.2f} ms, "
            f"rederive {overhead['rederived']:.2f} ms, "
            f"op-level selective checkpointing {overhead['selective']:.2f} ms: rederive adds "
            f"{overhead['overhead_over_selective']:.2f} of what that adds.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=[])
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="add rows under bf16 autocast")
    parser.add_argument("--out", default="bench/results")
    arguments = parser.parse_args()
    keep_freed_memory()
    date = datetime.date.today().isoformat()
    threads = torch.get_num_threads()
    head = {"date": date, "machine": platform.machine(), "torch": str(torch.__version__), "threads": threads}
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"rederive-cpu-{date}"
    rows: list[dict[str, Any]] = []
    overhead = None

    def write() -> None:
        everything = {**head, "rows": rows, "host_overhead": overhead}
        stem.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
        stem.with_suffix(".md").write_text(report(head, rows, overhead))

    for autocast in [False, True] if arguments.autocast else [False]:
        for name in arguments.workloads or list(WORKLOADS):
            row = run_workload(name, arguments.timed and not autocast, autocast)
            rows.append(row)
            write()
            time_text = f", CPU time {row['cpu_time_ratio']:.3f}" if "cpu_time_ratio" in row else ""
            print(
                f"{name} ({row['dtype']}): peak {row['peak_ratio']:.3f} of plain's "
                f"{row['plain_bytes'] / 2**20:.0f} MiB, saved {row['saved_ratio']:.3f}, exact {row['exact']}, "
                f"heavy FLOPs equal {row['heavy_flops_equal']}{time_text}",
                flush=True,
            )
    if arguments.timed:
        overhead = host_overhead()
        write()


if __name__ == "__main__":
    main()
