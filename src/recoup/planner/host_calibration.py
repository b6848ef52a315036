"""Measures what a plan's bookkeeping takes on this host: in a few processes of each machine, Python and torch version.

`host_seconds` is linear in the costs. A small model therefore runs plainly and under plans that do different amounts of
each kind of bookkeeping. What each plan takes above the plain step, its kernels aside, is one equation; what the plain
step takes above its kernels is two more. What a plan takes whatever it does is one more unknown, which nobody is
charged. The answer is the most likely one: a cost is `TYPICAL`'s times or divided by two, give or take, beside a factor
that all costs of a host have in common, of about half as much, and a time is off by what its repetitions are apart. So
no cost is zero, and those that the times cannot tell apart are as fast or slow as the rest. A second in which
something else has the memory shows in all or in one of the costs, so the median of several processes' counts. It is
rounded to `TYPICAL`'s times a power of the square root of two: finer, what is left of the noise would choose plans.

Tensors are as large as a core's cache holds a few of, since kernels of a real step drive the interpreter's data out of
it. Kernels are priced as in any plan: what an op takes longer inside of a step than alone counts as host time. Times
are those of this thread, the least of several steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup import _torch, progress
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.cache import host_path
from recoup.cost.host_costs import TYPICAL, HostCosts, load_host_costs, store_host_costs
from recoup.cost.host_overhead import host_seconds
from recoup.cost.measured import MeasuredCost, device_name
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Decision, LossInPlace, Rebuild, Recompute, Rederive, Save, follow_programs
from recoup.runtime.apply import apply_decisions
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES

_SOLVED = tuple(field.name for field in dataclasses.fields(HostCosts))
_STARTED = time.time()  # this process, near enough
_SPREAD_SHARE = math.log(2.0)
"""Of a cost's logarithm, beside its host's: half or twice as much is common. And twice the step of rounding."""


def host_costs() -> HostCosts:
    """Returns this host's costs: of each the median of what a few processes measured.

    The first measures (in about a second), and so does each later one until there are enough: what disturbs one second
    is another's no longer. Within a process costs stay. Where they cannot be kept for the next process they are those
    of a typical host, so that plans stay the same.
    """
    python, host = platform.python_version(), device_name(torch.device("cpu"))
    path = host_path(host, python_version=python, torch_version=torch.__version__)
    known = load_host_costs(path)
    if not known:
        trial = path.with_suffix(f".{os.getpid()}-trial")  # no other process's
        if not store_host_costs(trial, TYPICAL):
            return TYPICAL
        trial.unlink(missing_ok=True)
    if not known or (len(known) < MOST_TRIES and _was_written_before(path, _STARTED)):
        progress.advance("measuring this host's own costs")
        known = store_host_costs(path, measure_host_costs(), known=known) or known
    return _rounded_median(known) if known else TYPICAL


def _was_written_before(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime < moment
    except OSError:
        return False


def _rounded_median(measured: Sequence[HostCosts]) -> HostCosts:
    grain = _SPREAD_SHARE / 2
    found = {}
    for name, typical in dataclasses.asdict(TYPICAL).items():
        off = math.log(statistics.median(getattr(costs, name) for costs in measured) / typical)
        found[name] = typical * math.exp(round(off / grain) * grain)
    return HostCosts(**found)


def measure_host_costs(*, num_layers: int = 3, num_rounds: int = 2) -> HostCosts:
    """Returns this host's costs, measured now and not rounded.

    Args:
        num_layers: of the model: more make the differences larger, and take as much longer.
        num_rounds: in which the plans take turns, so that what else the machine does meets all of them.
    """
    plans = _plans(num_layers)
    with _undisturbed():
        model = nn.Sequential(*(_Layer() for _ in range(num_layers)))
        x = torch.ones(256, 128, device="cpu", dtype=torch.float32)
        spec = StepSpec(model=model, batch=x, objective=Objective(loss=lambda output, batch: output.sum()))
        cost = MeasuredCost(torch.device("cpu"))
        plain = cost.price(capture(spec))
        laps: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
        priced: dict[str, PricedTrace] = {"plain": plain}
        for _ in range(num_rounds):
            for name, decisions in plans.items():
                with apply_decisions(model, decisions):
                    priced[name] = priced.get(name) or cost.price(capture(spec, known=plain.trace))
                    # The second step follows the first one's program, and settles what its ops are called by.
                    for _ in range(2 if follow_programs(decisions) else 1):
                        _step(model, x)
                    laps[name].append(_least([_step(model, x) for _ in range(3)]))
        tape_seconds = [min(_tape_seconds() for _ in range(10)) for _ in range(num_rounds)]
    num_forward, num_ops = plain.trace.num_forward_ops, len(plain.op_seconds)
    kernels = sum(plain.op_seconds[:num_forward]), sum(plain.op_seconds[num_forward:])
    step = _least(laps["plain"])
    # Each row: how many times each cost is paid, and 1 where a plan is in place; the seconds; what they may be off.
    rows = [
        (_row(forward_op_seconds=num_forward), step[0] - kernels[0], _spread([lap[0] for lap in laps["plain"]])),
        (
            _row(backward_op_seconds=num_ops - num_forward),
            step[1] - kernels[1],
            _spread([lap[1] for lap in laps["plain"]]),
        ),
        (_row(tape_seconds=1.0, backward_op_seconds=1.0), min(tape_seconds), _spread(tape_seconds)),
    ]
    for name, decisions in plans.items():
        trace = priced[name].trace
        unit = [HostCosts(**{field: 1.0}) for field in _SOLVED]
        counts = [sum(host_seconds(decisions, trace, plain=plain.trace, costs=costs)) for costs in unit]
        above = sum(_least(laps[name])) - sum(step) - (sum(priced[name].op_seconds) - sum(kernels))
        rows.append(([*counts, 1.0], above, _spread([sum(lap) for lap in laps[name]])))
    return HostCosts(**dict(zip(_SOLVED, _most_likely(*zip(*rows, strict=True)), strict=True)))


def _least(laps: list[tuple[float, float]]) -> tuple[float, float]:
    return min(forward for forward, _ in laps), min(backward for _, backward in laps)


def _spread(seconds: list[float]) -> float:
    return max(max(seconds) - min(seconds), ESTIMATE_SHARE * min(seconds))


def _row(**counts: float) -> list[float]:
    return [counts.get(name, 0.0) for name in _SOLVED] + [0.0]


def _most_likely(rows: Sequence[list[float]], seconds: Sequence[float], off_seconds: Sequence[float]) -> list[float]:
    """Returns the positive costs, most likely given `seconds` and `TYPICAL`: Gauss-Newton steps on their logarithms.

    A cost's is its own beside the host's, which all have in common. A time that no likely costs explain, as on a busy
    machine, counts for less the farther it is off (Cauchy's weights).

    Args:
        rows: of each time, how many times it pays each cost, and what it pays of the unknown that nobody is charged.
        seconds: the times.
        off_seconds: what each may be off.
    """
    counts, times, off = np.asarray(rows), np.asarray(seconds), np.asarray(off_seconds)
    typical = np.asarray([getattr(TYPICAL, field) for field in _SOLVED])
    logs, common, rest = np.zeros(len(typical)), 0.0, 0.0
    prior = np.diag([1.0] * len(typical) + [2.0, 0.0])[:-1] / _SPREAD_SHARE
    for _ in range(MOST_TRIES * len(rows)):
        costs = np.append(typical * np.exp(logs + common), rest)
        wrong = times - counts @ costs
        weights = 1.0 / np.hypot(off, wrong)
        each, every = counts * costs, (counts * costs)[:, :-1].sum(axis=1, keepdims=True)
        slopes = np.hstack([each[:, :-1], every, counts[:, -1:]]) * weights[:, None]
        change, *_ = np.linalg.lstsq(
            np.vstack([slopes, prior]), np.append(wrong * weights, -prior @ np.append(logs, [common, 0.0])), rcond=None
        )
        logs = logs + np.clip(change[:-2], -1.0, 1.0)  # a logarithm is straight for so far
        common += np.clip(change[-2], -1.0, 1.0)
        rest += change[-1]
    found: list[float] = (typical * np.exp(logs + common)).tolist()
    return found


class _Layer(nn.Module):
    """A call of few ops, one of many, and one whose ops lie in calls of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many, self.nested = _Ops(num_rounds=1), _Ops(num_rounds=4), _Ops(num_rounds=4, has_calls=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.nested(self.many(self.few(x)))
        return out


class _Ops(nn.Module):
    """Elementwise ops, and a product at the end that a region may keep."""

    def __init__(self, *, num_rounds: int, has_calls: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((128, 128), 1 / 128, device="cpu", dtype=torch.float32))
        self.pairs = nn.ModuleList(_Pair() for _ in range(num_rounds))
        self.has_calls = has_calls

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = pair(x) if self.has_calls else pair.forward(x)
        return x @ self.weight


class _Pair(nn.Module):
    """Elementwise ops whose inputs autograd saves."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.gelu(0.5 * x))


def _plans(num_layers: int) -> Mapping[str, tuple[Decision, ...]]:
    """Returns plans whose amounts of bookkeeping tell its kinds apart."""

    def regions(name: str, keep: tuple[str, ...] = ()) -> tuple[Decision, ...]:
        return tuple(Recompute(path=f"{i}.{name}", keep=keep) for i in range(num_layers))

    return {
        "plain": (),
        "few ops": regions("few"),
        "many ops": regions("many"),
        "many calls": regions("nested"),
        "everywhere": (*regions("few"), *regions("many"), *regions("nested")),
        "kept": regions("many", keep=("matmul:128x128",)),
        "recorded": (Save(path=""), *regions("few")),
        "mixed": (Rederive(path="0.many"), *regions("few")),
        "rederived": (Rederive(path=""),),
        "rederived once": (Rederive(path="0.many"),),
        "rebuilt": (Rebuild(path=""),),
        "loss in place": (LossInPlace(path="", rows=1),),
    }


def _step(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Returns the seconds of this thread in forward and in backward."""
    begin = time.thread_time()
    loss = model(x).sum()
    middle = time.thread_time()
    loss.backward()
    end = time.thread_time()
    model.zero_grad()
    return middle - begin, end - middle


def _tape_seconds() -> float:
    """Returns the seconds of a call of autograd's engine for one op."""
    x = torch.ones(64, 32, device="cpu", requires_grad=True)
    y = (x * 2.0).sum()
    begin = time.thread_time()
    torch.autograd.grad(y, x)
    return time.thread_time() - begin


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Steps run as in a plain loop, whatever the caller is inside of; no random number is drawn."""
    no_hooks: tuple[dict[int, object], ...] = tuple({} for _ in _torch.global_forward_hooks())
    with (
        _torch.without_dispatch_modes(),
        _torch.under_global_forward_hooks(no_hooks),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield
