"""Memory that a training step needs of a card: the allocator simulated over the step's allocations. No torch.

A trace says which storage lives when; the simulated caching allocator says what that comes to on a card, where blocks
are rounded, left uncut and fragmented. *Allocated* is what `torch.cuda.max_memory_allocated` tells; *needed* the
smallest limit under which a process runs from its first step on, cached memory given back where that helps, as PyTorch
does.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from recoup.cost.caching_allocator import SMALL_SEGMENT_BYTES, Block, CachingAllocator, OutOfCard
from recoup.cost.devices import CUBLASLT_BYTES
from recoup.cost.flops import kind, op_name
from recoup.ir.trace import Signature, TensorSpec, Trace
from recoup.thresholds import ESTIMATE_SHARE, NEGLIGIBLE_SHARE, SAME_SHARE

_NUM_STEPS = 3  # gradients and workspaces are new in the first; after two more nothing moves
_LAST_RESULT_FIRST = frozenset(["native_dropout"])  # the mask is allocated before the result
CardEvents = list[tuple[int, int]]
"""What a step asks of the allocator, in order; see `CardMemory._events`."""
HiddenBlocks = Callable[[Signature, int], tuple[Sequence[int], Sequence[int]]]
"""Returns the bytes of blocks that an op holds beside its results, those it takes before them and those after, from its
signature and their sum as priced."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardNeed:
    """Memory that a step needs of a card.

    Attributes:
        allocated_bytes: at the peak, as `max_memory_allocated`.
        reserved_bytes: at most, if the card has plenty.
    """

    allocated_bytes: int
    reserved_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class CardSize:
    """The smallest card that a step runs on, in bytes that torch reserves; a CUDA context comes on top.

    Attributes:
        fresh_bytes: in a process that trains from its first step on.
        resumed_bytes: also in one that has loaded the optimizer's state before it.
        expandable_bytes: with expandable segments, in either.
        room_bytes: what torch has reserved when the first step begins, so that this holds; 0 if nothing is done for it.
    """

    fresh_bytes: int
    resumed_bytes: int
    expandable_bytes: int
    room_bytes: int = 0

    def worst_bytes(self, *, expandable: bool) -> int:
        """Returns the bytes that are enough in either case: a fresh process and one that resumes."""
        return self.expandable_bytes if expandable else self.resumed_bytes


class _History(NamedTuple):
    """What a process did before its first step, and how its driver places segments."""

    cached_bytes: int
    ascending: bool
    resumes: bool
    expandable: bool


class CardMemory:
    """The memory of one step, plain or planned, on a card.

    Args:
        plain: trace of the unplanned step: parameters, optimizer state and the optimizer's step are the same in all.
        plain_workspace: hidden bytes of each of its ops.
        hidden: how they are cut into blocks.
        thread_bytes: workspace that cuBLAS keeps for each thread that multiplies matrices: forward's and backward's.
    """

    def __init__(
        self, plain: Trace, plain_workspace: Sequence[int], *, hidden: HiddenBlocks, thread_bytes: int
    ) -> None:
        self._hidden = hidden
        self._thread_bytes = thread_bytes
        lasting = [s for s in plain.storages if s.alloc_op < 0 and s.nbytes]
        self._there = [s.nbytes for s in lasting if s.category not in ("optimizer", "gradient")]
        self._state = [s.nbytes for s in lasting if s.category == "optimizer"]
        self._gradients = [s.nbytes for s in lasting if s.category == "gradient"]  # of earlier micro-batches
        first = next((i for i, o in enumerate(plain.ops) if o.phase == "optimizer"), len(plain.ops))
        self._optimizer = self._events(plain, plain_workspace, first, len(plain.ops))

    def events(self, trace: Trace, workspace: Sequence[int]) -> CardEvents:
        """Returns the allocations and frees of forward and backward of a step, in order.

        Args:
            workspace: hidden bytes of each op.
        """
        last = next((i for i, o in enumerate(trace.ops) if o.phase == "optimizer"), len(trace.ops))
        return self._events(trace, workspace, 0, last)

    def need(self, step: CardEvents, *, expandable: bool = False) -> CardNeed:
        """Returns the memory of the step on a card that has plenty; `expandable`: with `expandable_segments:True`."""
        found = []
        for ascending in (False,) if expandable else (False, True):
            allocator = CachingAllocator(expandable=expandable, ascending=ascending)
            self._begin(allocator)
            self._run(allocator, step)
            found.append(allocator)
        return CardNeed(
            # A block that is not cut counts up to 1 MiB more, by where it happens to lie.
            allocated_bytes=int(max(a.peak_allocated_bytes for a in found) * (1 + NEGLIGIBLE_SHARE)),
            reserved_bytes=max(a.peak_reserved_bytes for a in found),
        )

    def size(self, step: CardEvents, plenty: CardNeed, *, reserves: bool) -> CardSize:
        """Returns the smallest card that a process runs the step on from its first step on.

        Args:
            plenty: what the step needs of a card that has plenty, see `need`.
            reserves: whether the process may take the step's memory in one piece before (`runtime/card_room.py`); it
                does where that asks for less.

        Without that, where blocks lie depends on what the process did before, and on where the driver puts segments.
        So several histories are tried: with and without a block of the largest weight's size that was let go before
        (weights that were tied, cast or moved leave such), and segments that ascend and descend. With the optimizer's
        state there before the first step (loaded from a checkpoint) it is a size of its own. The worst counts, and
        `SAME_SHARE` more for others.
        """
        expandable_bytes = _with_margin(self._smallest(step, self.need(step, expandable=True), expandable=True))
        room = self._room(step, plenty) if reserves else None
        if room is not None and not self._is_enough(step, room[1], resumes=False):
            needed_bytes = _with_margin(room[1])
            return CardSize(needed_bytes, needed_bytes, expandable_bytes, room[0])
        fresh_bytes = self._smallest(step, plenty, resumes=(False,))
        resumed_bytes = self._smallest(step, plenty, fresh_bytes, resumes=(True,))
        return CardSize(_with_margin(fresh_bytes), _with_margin(resumed_bytes), expandable_bytes)

    def _smallest(
        self,
        step: CardEvents,
        plenty: CardNeed,
        least_bytes: int = 0,
        *,
        resumes: tuple[bool, ...] = (False, True),
        expandable: bool = False,
    ) -> int:
        """Returns the smallest limit of at least `least_bytes` that the step runs under, whatever its history.

        Args:
            resumes: whether the optimizer's state is there before the step: histories to try.
        """
        worst, most = max(plenty.allocated_bytes, least_bytes), 2 * plenty.reserved_bytes
        precision = max(2 * SMALL_SEGMENT_BYTES, int(worst * NEGLIGIBLE_SHARE))
        for history in itertools.chain.from_iterable(self._histories(r, expandable=expandable) for r in resumes):
            low, high, gap = worst, worst, precision
            while high < most and (short := self._missing(step, high, history)):  # what is missing first is mostly all
                low, high, gap = high + short, min(high + max(short, gap), most), 4 * gap
            while high - low > precision:
                middle = (low + high) // 2
                short = self._missing(step, middle, history)
                low, high = (middle + short, high) if short else (low, middle)
            worst = high
        return worst

    def _is_enough(self, step: CardEvents, limit_bytes: int, *, resumes: bool) -> bool:
        """Whether the step runs under a limit, whatever its history."""
        return not any(self._missing(step, limit_bytes, history) for history in self._histories(resumes))

    def _histories(self, resumes: bool, *, expandable: bool = False) -> Iterator[_History]:
        """Returns what may have been before the step; the order of segments says nothing where they are expandable."""
        for cached_bytes in dict.fromkeys((0,) if resumes else (0, max(self._there, default=0))):
            for ascending in (False,) if expandable else (False, True):
                yield _History(cached_bytes, ascending=ascending, resumes=resumes, expandable=expandable)

    def _missing(self, step: CardEvents, limit_bytes: int, history: _History) -> int:
        """Returns what a limit lacks where the step fails first under it, 0 if it runs."""
        allocator = CachingAllocator(
            limit_bytes=limit_bytes, expandable=history.expandable, ascending=history.ascending
        )
        try:
            self._begin(allocator, history.cached_bytes, resumes=history.resumes)
            self._run(allocator, step, resumes=history.resumes)
        except OutOfCard as error:
            return error.missing_bytes
        return 0

    def _room(self, step: CardEvents, plenty: CardNeed) -> tuple[int, int] | None:
        """Returns the bytes that torch has best reserved when the first step begins, and the card that this takes.

        None if no size takes less than torch does by itself where there is plenty.

        A large block that is not to be had in what was reserved takes a segment of its own, so a little more can be
        much less. Sizes around what the step allocates are tried, each also `SAME_SHARE` short: what is there is not
        known to the byte, nor the order of all that is freed, nor where the driver puts segments.
        """
        allocated, most_bytes = plenty.allocated_bytes, plenty.reserved_bytes
        short = int(allocated * SAME_SHARE)
        best = 0, most_bytes
        histories = list(itertools.product((0, short), (False, True), (False, True)))
        # What is allocated first: it takes little, so that most others fail early.
        sizes = sorted(
            range(int(allocated * (1 - ESTIMATE_SHARE)), most_bytes, max(short, 1)),
            key=lambda b: abs(b - allocated),
        )
        for room_bytes in sizes:
            if room_bytes >= best[1]:
                continue
            found = []
            for history in histories:
                less, resumes, ascending = history
                limit_bytes = int(best[1] * (1 - NEGLIGIBLE_SHARE))  # what is hardly better is not looked for
                allocator = CachingAllocator(limit_bytes=limit_bytes, ascending=ascending)
                try:
                    self._begin(allocator, resumes=resumes)
                    missing = room_bytes - less - allocator.reserved_bytes
                    if missing > 0:
                        allocator.free(allocator.allocate(missing))
                    self._run(allocator, step, resumes=resumes)
                except OutOfCard:
                    histories.sort(key=history.__ne__)  # what fails here is likely to fail the next size
                    break
                found.append(allocator.peak_reserved_bytes)
            else:
                best = room_bytes, max(found)
        return best if best[0] else None

    def _events(self, trace: Trace, workspace: Sequence[int], first: int, last: int) -> CardEvents:
        """Returns (storage, bytes) as allocated, (storage, 0) as freed, (-1, bytes) for blocks of an op held together
        until (-2, 0), (-5, bytes) for a single one, (-3, thread) where a thread asks for cuBLAS's workspace, (-4,
        thread) for cuBLASLt's."""
        born: dict[int, list[int]] = {}
        died: dict[int, list[int]] = {}
        takes_over = _sums_in_place(trace)
        block_of = list(range(len(trace.storages)))
        for new, old in takes_over.items():  # in the order of the step
            block_of[new] = block_of[old]
        taken = set(takes_over.values())
        for index, storage in enumerate(trace.storages):
            if storage.nbytes and first <= storage.alloc_op < last:
                if index not in takes_over:
                    born.setdefault(storage.alloc_op, []).append(index)
                # A gradient that is there at the end is there for the optimizer, whoever lets go of it in a capture.
                if index not in taken and not (storage.category == "gradient" and storage.free_op >= last - 1):
                    died.setdefault(storage.free_op, []).append(block_of[index])
        workspaces = [_workspaces(s) for s in trace.signatures]
        events: CardEvents = []
        started: set[tuple[bool, bool]] = set()
        for i in range(first, last):
            op = trace.ops[i]
            backward = op.phase == "backward"
            results = born.get(i, ())
            early: Sequence[int] = ()
            late: Sequence[int] = ()
            if op.signature >= 0 and workspace[i]:
                early, late = self._hidden(trace.signatures[op.signature], workspace[i])
            events += [(-1, nbytes) for nbytes in early]
            if op.signature >= 0 and op_name(trace.signatures[op.signature].name) in _LAST_RESULT_FIRST:
                results = results[::-1]
            events += [(index, trace.storages[index].nbytes) for index in results]
            for is_lt in workspaces[op.signature] if op.signature >= 0 else ():
                if (backward, is_lt) not in started:
                    started.add((backward, is_lt))
                    events.append((-3 - is_lt, int(backward)))
            if len(late) == 1 and not early:
                events.append((-5, late[0]))
            elif early or late:
                events += [*((-1, nbytes) for nbytes in late), (-2, 0)]
            for index in died.get(i, ()):
                nbytes = trace.storages[index].nbytes
                if events and events[-1] == (index, nbytes):  # let go by the op that makes it
                    events[-1] = (-5, nbytes)
                else:
                    events.append((index, 0))
        return events

    def _begin(self, allocator: CachingAllocator, cached_bytes: int = 0, *, resumes: bool = False) -> None:
        """Allocates what exists before the first step (parameters), and allocates and frees `cached_bytes`."""
        for nbytes in (*self._there, *(self._state if resumes else ())):
            allocator.allocate(nbytes)
        if cached_bytes:
            allocator.free(allocator.allocate(cached_bytes))

    def _run(self, allocator: CachingAllocator, step: CardEvents, *, resumes: bool = False) -> None:
        threads: set[tuple[int, int]] = set()
        before: list[list[int]] = []
        for number in range(_NUM_STEPS):
            after = allocator.free_places()
            if number > 1 and after == before:  # the step before left everything as it found it: so will the next
                return
            before = after
            live: dict[int, Block] = {}
            earlier = [allocator.allocate(nbytes) for nbytes in self._gradients]
            self._play(allocator, step, live, threads)
            if number == 0 and not resumes:
                for nbytes in self._state:
                    allocator.allocate(nbytes)
            updated: dict[int, Block] = {}
            self._play(allocator, self._optimizer, updated, threads)
            for block in (*earlier, *live.values(), *updated.values()):  # gradients are let go
                allocator.free(block)

    def _play(
        self,
        allocator: CachingAllocator,
        events: CardEvents,
        live: dict[int, Block],
        threads: set[tuple[int, int]],
    ) -> None:
        hidden: list[Block] = []
        allocate, free = allocator.allocate, allocator.free
        for index, nbytes in events:
            if index >= 0:
                if nbytes:
                    live[index] = allocate(nbytes)
                else:
                    free(live.pop(index))
            elif index == -5:
                allocator.pass_through(nbytes)
            elif index == -1:
                hidden.append(allocate(nbytes))
            elif index == -2:
                for block in hidden:
                    free(block)
                hidden.clear()
            elif (index, nbytes) not in threads and self._thread_bytes:
                threads.add((index, nbytes))
                allocator.allocate(self._thread_bytes if index == -3 else CUBLASLT_BYTES)


def uses_cublas(trace: Trace) -> bool:
    """Whether some op of a step has cuBLAS, and so its workspaces, set up."""
    return any(_workspaces(s) for s in trace.signatures)


def uses_cudnn(trace: Trace) -> bool:
    """Whether some op of a step is computed by cuDNN, whose workspaces no table knows."""
    return any("cudnn" in s.name or kind(s.name) == "convolution" for s in trace.signatures)


def _workspaces(signature: Signature) -> tuple[bool, ...]:
    """Returns the workspaces that an op uses: False for cuBLAS's, True for cuBLASLt's (which fuses adding a bias)."""
    if kind(signature.name) != "matmul":  # convolutions are cuDNN's, which does not ask torch for it
        return ()
    bias = signature.args[0] if op_name(signature.name) == "addmm" and signature.args else None
    return (False, True) if isinstance(bias, TensorSpec) and len(bias.shape) == 1 else (False,)


def _with_margin(num_bytes: int) -> int:
    """Returns the bytes of a card for a process whose history was not tried."""
    return int(num_bytes * (1 + SAME_SHARE))


def _sums_in_place(trace: Trace) -> dict[int, int]:
    """Returns, by index, summed gradients that autograd accumulates in place, and the storage they really share.

    Captured they are new, and what they are added to ends before them (`capture/sums.py`).
    """
    found: dict[int, int] = {}
    for i, op in enumerate(trace.ops):
        if op.phase == "backward" and op.inputs and len(op.outputs) == 1:
            old, new = op.inputs[0], op.outputs[0]
            if trace.storages[old].free_op < i == trace.storages[new].alloc_op:
                found[new] = old
    return found
