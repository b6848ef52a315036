"""What each piece of a plan's bookkeeping takes on a host: measured on this one, typical for one that is elsewhere.

`planner/host_calibration.py` measures; this file keeps the answer on disk, beside the measurements of ops and under the
same rules (`cache.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of host time, kernels aside.

    Attributes:
        region_seconds: a region: noting and putting back state, its slots, the replay's start and end.
        passed_call_seconds: a call that nothing is decided about of a module of which other calls are regions.
        call_seconds: a module's call in a replay: its hooks, its graph, the checks of what it saves.
        replayed_op_seconds: an op that runs again, views and what is not seen of a call aside (`noticed_ops`).
        recorded_op_seconds: an op, views aside, that is recorded so that its result can be rebuilt.
        rederived_tensor_seconds: a tensor that is rebuilt from such a record: its search and its rebuild.
        packed_tensor_seconds: in forward, a tensor that a program will rebuild: its call is watched, and it is packed.
        beside_tensor_seconds: any further tensor that such a call saves, kept or rebuilt: it is packed too.
        followed_tensor_seconds: in backward, a tensor that is rebuilt by a program.
        single_tensor_seconds: the same under a plan that only rederives, which has each rebuilt by itself.
        rerun_op_seconds: an op, views aside, that a program runs again.
        loss_call_seconds: a call of a torch function in forward, while a cross entropy is waited for to run in place.
        watched_op_seconds: an op in forward, views aside, in a region that keeps results.
        tape_seconds: a call of autograd's engine for the taped steps of a scan.
        forward_op_seconds, backward_op_seconds: an op that is dispatched, the Python around it included.
    """

    region_seconds: float = 0.0
    passed_call_seconds: float = 0.0
    call_seconds: float = 0.0
    replayed_op_seconds: float = 0.0
    recorded_op_seconds: float = 0.0
    rederived_tensor_seconds: float = 0.0
    packed_tensor_seconds: float = 0.0
    beside_tensor_seconds: float = 0.0
    followed_tensor_seconds: float = 0.0
    single_tensor_seconds: float = 0.0
    rerun_op_seconds: float = 0.0
    loss_call_seconds: float = 0.0
    watched_op_seconds: float = 0.0
    tape_seconds: float = 0.0
    forward_op_seconds: float = 0.0
    backward_op_seconds: float = 0.0

    def among(self, coldness: float) -> HostCosts:
        """Returns the costs in a step of which `reuse.interpreter_coldness` says so.

        What a cache does not have takes the memory's time, however fast the host runs Python that it has.
        """
        typical, cold = dataclasses.asdict(TYPICAL), dataclasses.asdict(COLD)
        return HostCosts(**{n: getattr(self, n) + coldness * (cold[n] - typical[n]) for n in typical})

    def replay_seconds(self, *, num_ops: float, num_calls: int) -> float:
        """Returns the host time of ops that run again (`noticed_ops`), and of the modules' calls among them."""
        return num_ops * self.replayed_op_seconds + num_calls * self.call_seconds


TYPICAL = HostCosts(
    region_seconds=150e-6,
    passed_call_seconds=3e-6,
    call_seconds=100e-6,
    replayed_op_seconds=15e-6,
    recorded_op_seconds=22e-6,
    rederived_tensor_seconds=105e-6,
    packed_tensor_seconds=14e-6,
    beside_tensor_seconds=7e-6,
    followed_tensor_seconds=12e-6,
    single_tensor_seconds=25e-6,
    rerun_op_seconds=3e-6,
    loss_call_seconds=1.5e-6,
    watched_op_seconds=60e-6,
    tape_seconds=30e-6,
    forward_op_seconds=5e-6,
    backward_op_seconds=4.5e-6,
)
"""Of an x86 CPU, for steps that run elsewhere: medians of steps of tenths of a second, whose kernels drive the
interpreter's data out of the cache (bench/results/overhead-cpu-2026-11-22.md); the last two are of GPT-2 small at
batch 1 on the stub GPU. What a program takes is of a GRU of `bench.peers` (2026-11-26)."""

COLD = dataclasses.replace(
    TYPICAL,
    region_seconds=450e-6,
    replayed_op_seconds=45e-6,
    recorded_op_seconds=44e-6,
    packed_tensor_seconds=60e-6,
    followed_tensor_seconds=75e-6,
    single_tensor_seconds=85e-6,
    loss_call_seconds=4.5e-6,
)
"""The same in steps of large kernels, which leave nothing of the interpreter's in a core's cache: BERT and Llama of
`bench.peers`, rederived everywhere, whose ops move some megabytes each. What regions and ops that are recorded or run
again take is fitted on 24 plans of seven of its models, whose predicted seconds were 3.4 % of a step too few in the
mean, and are 0.4 % so (AMD EPYC, 2026-11-26). What a tensor takes that is rebuilt by itself is what samples of steps of
ViT, Llama, a mixture of experts and a chain of layers have outside of kernels above plain's: 4.9 to 7.9 ms for 25 to
127 tensors; what a call takes under the mode that waits for a loss is Llama's and T5's forward under one that does
nothing, 2.3 and 4.3 ms (2026-11-27)."""


def load_host_costs(path: Path) -> tuple[HostCosts, ...]:
    """Returns what processes measured, one after another; nothing if the file is missing, broken, or of other costs."""
    names = {field.name for field in dataclasses.fields(HostCosts)}
    try:
        found = [{name: float(seconds) for name, seconds in costs.items()} for costs in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, AttributeError):
        return ()
    is_whole = all(costs.keys() == names and min(costs.values()) > 0 for costs in found)
    return tuple(HostCosts(**costs) for costs in found) if is_whole else ()


def store_host_costs(path: Path, costs: HostCosts, *, known: tuple[HostCosts, ...] = ()) -> tuple[HostCosts, ...]:
    """Adds to the file unless another process was first; returns its contents, nothing if it cannot be written.

    Args:
        known: what was in the file when the measurement began.
    """
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps([dataclasses.asdict(each) for each in (*known, costs)]))
        if load_host_costs(path) == known:
            beside.replace(path)
    except OSError:
        return ()
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return load_host_costs(path)
