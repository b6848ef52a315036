"""Side by side: what people do by hand or by other tools, and recoup at the very same bytes, on one meter.

    python -m bench.peers [workload ...] [--quick] [--out bench/results]

Each method is a small function that changes the model for the duration. Its step is metered (allocator events, weights
and batch included), its FLOPs counted, its gradients compared with plain's, and it is timed beside plain (CPU time,
interleaved, median of ratios). Then recoup is given the method's peak as its budget and measured the same way. A run
that was interrupted goes on: rows in the JSON file are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import recoup
from bench.peers_report import write_report
from recoup.cli.allocator import keep_freed_memory
from recoup.engine.handle import apply_decisions
from recoup.evidence.gradients import compare
from recoup.evidence.memory import measure_peak
from recoup.evidence.verify import StepBench
from recoup.ir.plan import Decision
from recoup.selective.layers import find_layers
from recoup.targets.resolve import Target, resolve_target

_TEXT = {"batch": 4, "seq": 256}
WORKLOADS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("hf:gpt2?n_layer=6,n_embd=384,n_head=6,vocab_size=8000", _TEXT),
    "llama": (
        "hf:llama?num_hidden_layers=6,hidden_size=384,intermediate_size=1024,num_attention_heads=6,vocab_size=8000",
        _TEXT,
    ),
    "bert": (
        "hf:bert?num_hidden_layers=6,hidden_size=384,intermediate_size=1536,num_attention_heads=6,vocab_size=8000",
        _TEXT,
    ),
    "t5": ("hf:t5?num_layers=3,d_model=256,d_kv=64,num_heads=4,d_ff=1024,vocab_size=8000", _TEXT),
    "vit": (
        "hf:vit?hidden_size=384,num_hidden_layers=8,num_attention_heads=6,intermediate_size=1536",
        {"batch": 8},
    ),
    "resnet": ("hf:resnet", {"batch": 8, "image": 128}),
    "unet": ("examples/unet.py", {}),
    "conv3d": ("examples/conv3d.py", {}),
    "mlp-chain": ("bench/targets.py:mlp_chain", {}),
}
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
_HEAVY = {*_MATMULS, torch.ops.aten.convolution.default} | {
    getattr(torch.ops.aten, name).default
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
    if hasattr(torch.ops.aten, name)
}
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def wrapped(model: nn.Module, paths: list[str], wrap: Wrap) -> Iterator[None]:
    """Replaces the forwards of the modules at `paths` for the duration."""
    modules = [model.get_submodule(path) for path in paths]
    for module in modules:
        module.forward = wrap(module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(checkpoint, forward, use_reentrant=False)


def _selective(saved: set[Any]) -> Wrap:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda forward: functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def every(model: nn.Module, k: int) -> Any:
    """Every k-th layer recomputed by torch.utils.checkpoint."""
    return wrapped(model, find_layers(model)[::k], _checkpointed)


def selective(model: nn.Module, saved: set[Any]) -> Any:
    """Every layer checkpointed, the results of some ops kept (op-level SAC)."""
    return wrapped(model, find_layers(model), _selective(saved))


@contextlib.contextmanager
def transformers_switch(model: nn.Module) -> Iterator[None]:
    """transformers' own activation checkpointing."""
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise NotImplementedError("not a transformers model")
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise NotImplementedError("transformers has no activation checkpointing for it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()


@contextlib.contextmanager
def memory_budget(model: nn.Module, share: float) -> Iterator[None]:
    """torch's memory budget: every layer compiled, the partitioner keeps that share of its activations."""
    import torch._dynamo
    import torch._functorch.config as config

    before = config.activation_memory_budget
    torch._dynamo.reset()
    config.activation_memory_budget = share
    try:
        paths = find_layers(model)
        with wrapped(model, paths, functools.partial(torch.compile, backend="aot_eager_decomp_partition")):
            yield
    finally:
        config.activation_memory_budget = before
        torch._dynamo.reset()


def rederived(model: nn.Module) -> Any:
    """recoup's rederive everywhere, without a plan."""
    return apply_decisions(model, (Decision(path="", action="rederive"),))


METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: contextlib.nullcontext(),
    "every layer": lambda model: every(model, 1),
    "every 2nd layer": lambda model: every(model, 2),
    "every 3rd layer": lambda model: every(model, 3),
    "SAC, matmuls kept": lambda model: selective(model, _MATMULS),
    "SAC, matmuls, attention, convolutions kept": lambda model: selective(model, _HEAVY),
    "transformers' switch": transformers_switch,
    "memory budget 0.5, compiled layers": lambda model: memory_budget(model, 0.5),
    "memory budget 0.1, compiled layers": lambda model: memory_budget(model, 0.1),
    "rederive alone (recoup)": rederived,
}


def measured(
    bench: StepBench, enter: Callable[[nn.Module], Any], plain: dict[str, Any] | None, *, compiles: bool = False
) -> dict[str, Any]:
    """Returns peak bytes, FLOPs, whether it is exact, and CPU time over plain's of one way to run the step."""
    row: dict[str, Any] = {}

    def fresh() -> None:
        bench.restore()  # before the method comes in: it would put back what the method changed

    fresh()
    with enter(bench.model):
        bench.step()  # what a first step allocates or compiles once
    fresh()
    with enter(bench.model):
        if compiles:
            bench.step()
            bench.model.zero_grad()
        row["peak_bytes"] = measure_peak(bench.step, device=bench.device, held_bytes=bench.held_bytes())
    fresh()
    with enter(bench.model), FlopCounterMode(display=False) as counter:
        bench.step()
    row["flops"] = counter.get_total_flops()
    fresh()
    with enter(bench.model):
        result = bench.step(take=True)
    bench.restore()
    if plain is None:
        return {**row, "result": result, "exact": True, "gradient_error": 0.0, "time_ratio": 1.0}
    assert result is not None
    comparison = compare(plain["result"], result)
    row["exact"] = not comparison.differences
    row["gradient_error"] = comparison.max_gradient_error
    ratios = []
    for turn in range(3):
        seconds = {}
        ways = [("plain", METHODS["plain"]), ("it", enter)]
        for label, way in ways if turn % 2 else reversed(ways):
            fresh()
            with way(bench.model):
                if compiles:
                    bench.step()
                begun = time.process_time()
                bench.step()
                seconds[label] = time.process_time() - begun
        ratios.append(seconds["it"] / seconds["plain"])
    row["time_ratio"] = statistics.median(ratios)
    return row


def run(name: str, rows: list[dict[str, Any]], save: Callable[[], None], quick: bool) -> None:
    """Measures every method on one workload, and recoup at each one's peak; appends to `rows`."""
    done = {(r["workload"], r["method"]) for r in rows}
    target: Target = resolve_target(WORKLOADS[name][0], **WORKLOADS[name][1])
    bench = StepBench(target.model, target.batch, target.loss, None)
    plain = measured(bench, METHODS["plain"], None)
    planner = recoup.frontier(target.model, target.batch, loss=target.loss, num_points=2)
    for method, enter in METHODS.items():
        if (name, method) in done or (quick and "compiled" in method):
            continue
        row: dict[str, Any] = {"workload": name, "method": method, "plain_bytes": plain["peak_bytes"]}
        row["plain_flops"] = plain["flops"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = plain if method == "plain" else measured(bench, enter, plain, compiles="compiled" in method)
            row |= {k: v for k, v in found.items() if k != "result"}
        except Exception as error:
            bench.restore()
            row["why_not"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if "peak_bytes" in row and method != "plain":
            begun = time.perf_counter()
            try:
                plan = planner.plan(max(row["peak_bytes"], 1))
                planning_seconds = time.perf_counter() - begun
                ours = measured(bench, lambda model, plan=plan: recoup.apply(model, plan), plain)
                row["recoup"] = {
                    **ours,
                    "predicted_bytes": plan.predicted.peak_bytes,
                    "predicted_time_ratio": 1 + plan.predicted.extra_time_ratio,
                    "planning_seconds": planning_seconds,
                }
            except recoup.InfeasibleBudget as error:
                row["recoup"] = {"why_not": str(error).split("\n")[0], "minimum_bytes": error.minimum_bytes}
        rows.append(row)
        save()
        print(_line(row), flush=True)
    if (name, "floor") not in done:
        smallest = planner.points[0].plan
        ours = measured(bench, lambda model: recoup.apply(model, smallest), plain)
        ours |= {"predicted_bytes": smallest.predicted.peak_bytes}
        ours["predicted_time_ratio"] = 1 + smallest.predicted.extra_time_ratio
        row = {"workload": name, "method": "floor", "plain_bytes": plain["peak_bytes"], "plain_flops": plain["flops"]}
        rows.append({**row, "recoup": ours})
        save()
        print(_line(rows[-1]), flush=True)


def _line(row: dict[str, Any]) -> str:
    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return "-"
        if "peak_bytes" not in found:
            return found.get("why_not", "-")[:60]
        return (
            f"{found['peak_bytes'] / row['plain_bytes']:.3f} bytes, {found['flops'] / row['plain_flops']:.3f} FLOPs, "
            f"{found['time_ratio']:.3f} time{'' if found['exact'] else ', NOT EQUAL'}"
        )

    return f"{row['workload']}, {row['method']}: {cell(row)} | recoup {cell(row.get('recoup'))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=[])
    parser.add_argument("--quick", action="store_true", help="without what has to be compiled")
    parser.add_argument("--out", default="bench/results")
    arguments = parser.parse_args()
    keep_freed_memory()
    date = datetime.date.today().isoformat()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"peers-cpu-{date}.json"
    head = {
        "date": date,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": str(torch.__version__),
        "load": [round(x, 1) for x in os.getloadavg()],
    }
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else []

    def save() -> None:
        file.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
        write_report(file)

    for name in arguments.workloads or list(WORKLOADS):
        run(name, rows, save, arguments.quick)


if __name__ == "__main__":
    main()
