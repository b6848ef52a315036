"""The solver's view of a step: a tree of calls, each with the prices of its actions. Plain numbers.

A training step is a *sequence of parts* in forward order; backward visits them in reverse. A part is a `Leaf` (ops
that belong together and have no region of their own) or a `Block` (a call: a sequence of parts again, that may also
become one region). Walking the sequence forward, `level` is the sum of the `saved_bytes` of the parts walked so far;
a part's `forward_bytes` and `backward_bytes` are peaks *above* that level, transients and tensors in flight included.
"""

from __future__ import annotations

import dataclasses

from recoup.ir.decision import Ambient
from recoup.solver.ways import RungOf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a leaf.

    Attributes:
        ambient: what it does with what autograd would save.
        rung: of a leaf that is a scan, in how many bytes it runs; None: all steps taped.
        saved_bytes: left saved after its forward.
        forward_bytes, backward_bytes: peaks above the level before it.
        extra_seconds: over the plain step.
    """

    ambient: Ambient
    rung: RungOf | None = None
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    extra_seconds: float
    extra_flops: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Ops that go together. `owner` is the (path, call) whose action they follow.

    `gradient_bytes`: parameter gradients that exist once its backward has run, and stay. `group`: leaves of one group
    rederive from what each other keep, so they do so together (-1: from nobody's but their own).
    """

    owner: tuple[str, int]
    options: tuple[Option, ...]
    gradient_bytes: int = 0
    group: int = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Ops of a region whose results it keeps, so that its replay need not run them.

    Attributes:
        labels: of the ops, see `cost.flops.result_label`.
        nbytes: of their results.
        saved_inside_bytes: of those, what the replay's autograd saves: there once, not twice.
        seconds, flops: of the ops.
    """

    labels: tuple[str, ...]
    nbytes: int
    saved_inside_bytes: int
    seconds: float
    flops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The price of making a block one region.

    Attributes:
        saved_bytes: its inputs that nobody else holds anyway (pinned by the region).
        forward_bytes: peak of its forward when autograd keeps nothing, above the level before it.
        replay_bytes: in flight while it is replayed, beside its own replay: incoming gradients.
        seconds, flops: of one more forward, host overhead included; a replay stops at the last thing that is saved.
        entry_seconds: what of `seconds` only the first call of a span pays: rebuilding its inputs.
        tail_seconds, tail_flops: of what is behind that last save, run again where calls of the same span follow.
        is_alone: whether it may be a region by itself; a call whose replay would run nothing is only part of spans.
        begins: whether a region may begin with it; not where its input is changed in place.
        keeps: ways to keep results inside.
        offload_seconds: what moving its inputs to the host and back adds; None where that is no choice.
    """

    saved_bytes: int
    forward_bytes: int
    replay_bytes: int
    seconds: float
    flops: int
    entry_seconds: float = 0.0
    tail_seconds: float = 0.0
    tail_flops: int = 0
    is_alone: bool = True
    begins: bool = True
    offload_seconds: float | None = None
    keeps: tuple[Keep, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The price of moving a block's saved tensors to the host; all of its leaves run under `inside`.

    Attributes:
        saved_bytes: what stays.
        forward_bytes: peak of its forward above the level before it.
        seconds: what the copies add to the step.
    """

    inside: Ambient
    saved_bytes: int
    forward_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A call: `parts` in forward order; `region` is None where it cannot be one.

    `chained`: its only input is the whole output of the part before it, so that the two may form one span.
    `offloads`: ways to move what it saves to the host.
    """

    path: str
    call: int
    kind: str
    parts: tuple[Leaf | Block, ...]
    region: Region | None
    chained: bool = False
    offloads: tuple[Offload, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One step.

    Attributes:
        parts: the step in forward order (usually the model's block, then the loss).
        fixed_bytes: there all the time: parameters, buffers, optimizer state, batch.
        optimizer_peak_bytes: peak of the optimizer step, everything counted (0 without one).
        plain_seconds, plain_flops: of the step without a plan.
    """

    parts: tuple[Leaf | Block, ...]
    fixed_bytes: int
    optimizer_peak_bytes: int
    plain_seconds: float
    plain_flops: int
