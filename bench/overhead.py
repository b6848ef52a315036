"""Host time of a planned step: what it takes above the plain one where kernels cost next to nothing.

    python -m bench.overhead [MODEL ...] [--json FILE] [--profile MODEL PLAN]

Models of 24 tiny blocks (of modules, of functions over bare parameters, GPT-2's, with dropout, with BatchNorm) under
each kind of plan, beside `torch.utils.checkpoint` around every block. Processor time of the whole process, so that both
of autograd's threads count. Plans take turns of some steps in a row: in a training, too, no other model's step comes
between. A turn counts with its fastest step, and what is said are medians over rounds of the differences within a
round. Microseconds:

- *forward, an op*: forward above plain, over the ops that the plain forward dispatches.
- *backward, a rebuilt tensor*: backward above plain, less the ops that run again (timed by themselves), over the saved
  tensors that are rebuilt.
- *a region*: the same over forward and backward, over the regions.

*Varied lengths*: each step has another length, as padded texts have; medians of ratios to steps of the same length.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import gc
import json
import platform
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.ir.decision import Decision, OpMark, Rebuild, Recompute, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import apply_held
from recoup.runtime.rebuild.held_recorder import HeldRecorder
from recoup.runtime.rebuild.marks import CallMarks, reads_numbers

BLOCKS, WIDTH, HEADS, ROWS, COLUMNS = 24, 32, 2, 2, 32
_ROUNDS = 15
_NUM_IN_A_ROW = 4  # steps of a turn


class ModuleBlock(nn.Module):
    """A residual block of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.down = nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


class FunctionBlock(nn.Module):
    """The same over bare parameters, with a gate: all of it ops of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        a, b = (y @ self.up).chunk(2, -1)
        return x + (F.silu(a) * b) @ self.down


class Gpt2Block(nn.Module):
    """GPT-2's block, its GELU written out."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns, _ = x.shape
        parts = self.qkv(self.ln_1(x)).split(WIDTH, -1)
        q, k, v = (p.view(rows, columns, HEADS, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(mixed)
        h = self.up(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0))))
        out: Tensor = x + self.down(h)
        return out


class DropoutBlock(ModuleBlock):
    """The block of modules with dropout, in training."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + F.dropout(self.down(F.dropout(self.act(self.up(self.norm(x))), 0.1)), 0.1)
        return out


class BatchNormBlock(nn.Module):
    """A residual block with BatchNorm in training and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.BatchNorm1d(COLUMNS),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.relu(self.norm(self.up(x)), inplace=True))
        return out


class Model(nn.Module):
    """The blocks in a row; `by_hand` puts `torch.utils.checkpoint` around each."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(BLOCKS))
        self.by_hand = False
        self.at_block: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            self.at_block()
            if self.by_hand:
                x = checkpoint(block, x, use_reentrant=False)
            elif isinstance(block, FunctionBlock):
                x = block.forward(x)
            else:
                x = block(x)
        self.at_block()
        return x.pow(2).mean()


MODELS: dict[str, type[nn.Module]] = {
    "modules": ModuleBlock,
    "functions": FunctionBlock,
    "gpt2": Gpt2Block,
    "dropout": DropoutBlock,
    "batch norm": BatchNormBlock,
}


class _NoneAnywhere(dict[Any, Any]):
    """Marks of a plan: no op has one, though any might, so that all have numbers."""

    def get(self, key: Any, default: Any = None) -> Any:
        return CallMarks({})


def block_marks(model: Model, x: Tensor) -> Rebuild:
    """Returns the plan by tensor that holds what each block hands on, as checkpointing every block does."""
    found: list[OpMark] = []
    starts: list[int] = []
    real = HeldRecorder.before_op

    def before_op(self: Any, name: str, args: tuple[Any, ...]) -> OpMark | None:
        frame = self._frames[-1]
        if reads_numbers(args):
            found.append(OpMark(path=frame.path, call=self._calls[frame.path] - 1, ordinal=frame.ordinal, op=name))
        return real(self, name, args)

    model.at_block = lambda: starts.append(len(found))
    HeldRecorder.before_op = before_op  # type: ignore[method-assign]
    marks_of = apply_held.marks_of
    apply_held.marks_of = lambda marks: _NoneAnywhere()
    try:
        with apply_decisions(model, [Rebuild(path="")]), _Ops():  # behind a mode each op is recorded by itself
            model(x)
    finally:
        apply_held.marks_of = marks_of
        HeldRecorder.before_op = real  # type: ignore[method-assign]
        model.at_block = lambda: None
    marks = {i: dataclasses.replace(found[i], begins_segment=True) for i in starts}
    for i in starts[1:]:
        marks[i - 1] = dataclasses.replace(found[i - 1], holds=True)
    marks[starts[-1]] = dataclasses.replace(marks[starts[-1]], saves=True)
    return Rebuild(path="", marks=tuple(marks[i] for i in sorted(marks)))


def plans(name: str, model: Model, x: Tensor) -> dict[str, list[Decision]]:
    """Returns the plans that are measured on a model."""
    found: dict[str, list[Decision]] = {"rederive": [Rederive(path="")], "rebuild": [block_marks(model, x)]}
    if name != "functions":
        found["regions"] = [Recompute(path=f"blocks.{i}") for i in range(BLOCKS)]
    return found


class _Ops(TorchDispatchMode):
    """Notes the ops that run, and those that run a second time with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.again: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        if recoup.is_recomputing():
            self.again.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _microseconds(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    out = run()
    return (time.process_time() - begin) * 1e6, out


def _step(model: Model, x: Tensor) -> tuple[float, float]:
    """Returns forward's and backward's microseconds."""
    forward, loss = _microseconds(lambda: model(x))
    backward, _ = _microseconds(loss.backward)
    model.zero_grad()
    return forward, backward


def _turn(model: Model, x: Tensor) -> tuple[float, float]:
    """Returns forward's and backward's microseconds of the fastest of some steps in a row."""
    return min([_step(model, x) for _ in range(_NUM_IN_A_ROW)], key=sum)


def _varied(models: dict[str, Model], rounds: int) -> dict[str, list[float]]:
    """Returns the microseconds of steps of many lengths, the same for all models."""
    found: dict[str, list[float]] = {kind: [] for kind in models}
    for i in range(-_NUM_IN_A_ROW, rounds * _NUM_IN_A_ROW):
        x = torch.randn(ROWS, COLUMNS // 2 + i * 7 % COLUMNS, WIDTH)
        for kind, model in models.items():
            microseconds = sum(_step(model, x))
            if i >= 0:
                found[kind].append(microseconds)
    return found


def _peak_bytes(model: Model, x: Tensor) -> int:
    held_bytes = storage_bytes([*model.parameters(), x])
    peak = measure_peak(lambda: model(x).backward(), device=torch.device("cpu"), held_bytes=held_bytes)
    model.zero_grad()
    return peak


def measure(name: str, rounds: int = _ROUNDS) -> dict[str, dict[str, float]]:
    """Returns the figures of each plan on a model."""
    torch.manual_seed(0)
    plain, by_hand = Model(MODELS[name]), Model(MODELS[name])
    by_hand.by_hand = True
    x = torch.randn(ROWS, COLUMNS, WIDTH)
    models: dict[str, Model] = {"plain": plain, "checkpoint": by_hand}
    logs = {}
    for kind, decisions in plans(name, plain, x).items():
        models[kind] = Model(MODELS[name])
        logs[kind] = apply_decisions(models[kind], decisions)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in models}
    again: dict[str, float] = dict.fromkeys(models, 0.0)
    num_again: dict[str, int] = dict.fromkeys(models, 0)
    for model in models.values():
        for _ in range(4):
            _step(model, x)
    with _Ops() as forward_ops:
        plain(x)
    gc.collect()
    for _ in range(rounds):
        for kind, model in models.items():
            times[kind].append(_turn(model, x))
    events = {}
    for kind, applied in logs.items():
        before = applied.log
        with _Ops() as ops:
            models[kind](x).backward()
        events[kind] = applied.log - before
        num_again[kind] = len(ops.again)
        with torch.no_grad():
            laps = [_microseconds(lambda: [f(*a, **k) for f, a, k in ops.again])[0] for _ in range(9)]
        again[kind] = statistics.median(laps)
        models[kind].zero_grad()
    varied = _varied(models, rounds) if name != "batch norm" else {}  # whose layers are of one length
    found: dict[str, dict[str, float]] = {}
    for kind in models:
        forward = statistics.median(a[0] - b[0] for a, b in zip(times[kind], times["plain"], strict=True))
        backward = statistics.median(a[1] - b[1] for a, b in zip(times[kind], times["plain"], strict=True))
        figures = {
            "step_us": statistics.median(sum(t) for t in times[kind]),
            "peak_bytes": float(_peak_bytes(models[kind], x)),
            "forward_above_us": forward,
            "backward_above_us": backward,
            "forward_ops": float(forward_ops.number),
            "forward_op_us": forward / forward_ops.number,
            "again_ops": float(num_again[kind]),
            "again_us": again[kind],
        }
        if varied:
            figures["varied_of_plain"] = _median_ratio(varied[kind], varied["plain"])
            figures["varied_of_checkpoint"] = _median_ratio(varied[kind], varied["checkpoint"])
        if kind in events and events[kind].num_rederived:
            figures["rebuilt"] = float(events[kind].num_rederived)
            figures["rebuilt_us"] = (backward - again[kind]) / events[kind].num_rederived
        if kind in events and events[kind].num_replays:
            figures["regions"] = float(events[kind].num_replays)
            figures["region_us"] = (forward + backward - again[kind]) / events[kind].num_replays
        found[kind] = figures
    for applied in logs.values():
        applied.remove()
    return found


def _median_ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Returns the figures as Markdown."""
    lines = [
        "| model | plan | step, of plain's | of checkpoint's | peak, of checkpoint's | forward, an op | "
        "rebuilt tensors | backward, each | regions | each | its ops | varied lengths, of plain's | of checkpoint's |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, kinds in found.items():
        plain, by_hand = kinds["plain"]["step_us"], kinds["checkpoint"]
        for kind, f in kinds.items():
            rebuilt = f"{f['rebuilt']:.0f} | {f['rebuilt_us']:.1f}" if "rebuilt" in f else "|"
            region = "| |"
            if "regions" in f:
                region = f"{f['regions']:.0f} | {f['region_us']:.0f} | {f['again_ops'] / f['regions']:.0f}"
            varied = " | |"
            if "varied_of_plain" in f:
                varied = f" {f['varied_of_plain']:.2f} | {f['varied_of_checkpoint']:.2f} |"
            lines.append(
                f"| {name} | {kind} | {f['step_us'] / plain:.2f} | {f['step_us'] / by_hand['step_us']:.2f} | "
                f"{f['peak_bytes'] / by_hand['peak_bytes']:.2f} | {f['forward_op_us']:.1f} | {rebuilt} | {region} |"
                f"{varied}"
            )
    return "\n".join(lines)


def profile(name: str, kind: str) -> None:
    """Prints where the time of ten steps goes."""
    torch.manual_seed(0)
    model, x = Model(MODELS[name]), torch.randn(ROWS, COLUMNS, WIDTH)
    apply_decisions(model, plans(name, model, x)[kind])
    for _ in range(4):
        _step(model, x)
    recorded = cProfile.Profile()
    recorded.runcall(lambda: [_step(model, x) for _ in range(10)])
    pstats.Stats(recorded).sort_stats("tottime").print_stats(45)


def main() -> None:
    """Prints the table; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", nargs=2)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*took a step that its plan was not made for.*")
    torch.set_num_threads(1)
    if arguments.profile:
        profile(*arguments.profile)
        return
    found = {name: measure(name) for name in arguments.models}
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(table(found))
    if arguments.json:
        machine = {"machine": platform.platform(), "torch": torch.__version__, "python": platform.python_version()}
        arguments.json.write_text(json.dumps(machine | {"date": time.strftime("%Y-%m-%d"), "models": found}, indent=1))


if __name__ == "__main__":
    main()
