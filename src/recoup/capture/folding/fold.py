"""Skips repeated calls of a loop over time: the capture runs about as many ops as a few of its steps have.

A module that one parent calls many times is run in full for its first and last calls. A call between them whose
arguments and module state have the same metadata is not run but *folded*: it returns fresh fake tensors like those of
the calls before, linked by one autograd node, and leaves a mark in the tracker where its ops would be, in forward and
in backward. `unfold.py` replaces every mark by the ops that the executed calls ran there, and checks that the executed
calls before and after it ran the same ops. If they did not, the step is captured again without folding.

Ops between the calls are run and recorded as usual. Not detected: a forward that changes its ops in the middle of the
loop because of something that is neither an argument nor kept in its modules (a global counter).

Example: a cell called 1,000 times. Calls 0-3 and 996-999 run, 4-995 are folded; the trace then has the ops of all
1,000, with storages numbered as in a full capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.capture.folding.folded_loop import Bridge, Loop
from recoup.capture.folding.zones import Counted, FoldingMemory, Irregular, find_chunks, find_zones
from recoup.capture.module_calls import CallRecorder
from recoup.capture.tracker import Tracker
from recoup.runtime.patch import find_patch
from recoup.runtime.recompute.module_state import walk
from recoup.solver.loops import FEWEST_CALLS
from recoup.thresholds import MOST_TRIES


class Folding:
    """Folds the loops of one run of a step; a context manager, entered after the recorder.

    Args:
        watches: whether to look for loops that `memory` does not know yet.
        likely: expected number of calls of such a loop.

    Attributes:
        loops: by path.
        failed: why the recording cannot be unfolded, if something came up in backward.
    """

    def __init__(
        self,
        model: nn.Module,
        tracker: Tracker,
        recorder: CallRecorder,
        memory: FoldingMemory,
        *,
        watches: bool = False,
        likely: int = 0,
    ) -> None:
        self._watches = watches
        self._likely = likely
        self.tracker = tracker
        self.recorder = recorder
        self.loops: dict[str, Loop] = {}
        self.failed = ""
        self.comparing = 0
        self._memory = memory
        self._watched: dict[tuple[str, int], int] = {}
        self._modules = dict(model.named_modules())
        self._placed: list[tuple[nn.Module, Any]] = []
        self.anchor = torch.empty(0, requires_grad=True)
        patches = [p for p in map(find_patch, model.modules()) if p is not None]
        states = [p.settings.state for p in patches if hasattr(getattr(p.settings, "state", None), "calls")]
        self.counted: dict[str, int] | None = states[0].calls if states else None
        self._chunks: dict[int, tuple[int, int]] = {}  # of how many calls: (calls a chunk, calls in chunks)
        for path, num_calls in memory.num_calls.items():
            chunks = find_chunks(self._modules, path, num_calls)
            if chunks is not None and chunks[0] > 1:
                self._chunks[num_calls] = chunks
        for path, num_calls in memory.num_calls.items():
            if self._can_fold(path):
                self._begin(path, num_calls, 0)

    def _can_fold(self, path: str) -> bool:
        module = self._modules[path]
        if module._backward_hooks or module._backward_pre_hooks:
            return False
        for _, below in walk(module):
            if below is module:
                continue
            if below._backward_hooks or below._backward_pre_hooks or below._forward_hooks or below._forward_pre_hooks:
                return False
        return True

    def _begin(self, path: str, num_calls: int | None, first: int) -> None:
        module = self._modules[path]
        zones = []
        self.tracker.counting = False  # its first calls are looked at closely
        if num_calls is not None:
            chunks = find_chunks(self._modules, path, num_calls)
            zones = [] if chunks is None else find_zones(num_calls, *self._chunks.get(num_calls, chunks))
            if not zones:
                return
        loop = Loop(self, path, module, num_calls, zones, first)
        self.loops[path] = loop
        self._placed.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = _FoldedForward(loop, module)

    def watch(self, path: str, parent: int) -> None:
        """Counts a call; from `FEWEST_CALLS` calls of a module by one parent on, they are treated as a loop."""
        if not self._watches or path in self.loops or path in self._memory.excluded or parent < 0:
            return
        count = self._watched[path, parent] = self._watched.get((path, parent), 0) + 1
        if count == FEWEST_CALLS and not any(path.startswith(f"{p}.") for p in self.loops):
            if sum(p == path for p, _ in self._watched) > 1 or not _is_free_of_hooks(self._modules[path]):
                self._memory.excluded.add(path)
            elif self._likely > 2 * FEWEST_CALLS and path not in self._memory.num_calls:
                self._memory.num_calls[path] = self._likely
                raise Counted
            else:
                self._begin(path, None, count)

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """While calls are compared: asking for an unknown lineage is allowed, and fails nothing."""
        self.comparing += 1
        try:
            yield
        finally:
            self.comparing -= 1

    def end_forward(self) -> None:
        """Checks the number of calls of every loop.

        Raises:
            Counted: if the run was made to count them, or the numbers changed; `memory` has the new ones.
            Irregular: if the numbers keep changing from run to run.
        """
        changed = {p: loop.index for p, loop in self.loops.items() if loop.index != loop.num_calls}
        for path, num_calls in changed.items():
            if num_calls < FEWEST_CALLS or self._memory.recounts >= MOST_TRIES:
                raise Irregular(path, f"it was called {num_calls} times, not {self.loops[path].num_calls}")
            if not any(path.startswith(f"{p}.") for p in changed):
                self._memory.num_calls[path] = num_calls
        if changed:
            self._memory.recounts += 1
            raise Counted

    def takes(self, node: Any, func: Any, tensors: list[torch.Tensor], out: Any) -> bool:
        """Whether an op of backward only sums gradients of a folded call; its result then stands for that gradient."""
        block = getattr(node, "block", None) if _torch.is_node_of(node, Bridge) else None
        if block is None:
            return False
        slots = [block.slots[i] for i in map(self.tracker.find, tensors) if i in block.slots]
        if func is not torch.ops.aten.add.Tensor or len(slots) != 1:
            self.failed = f"{func} runs where a folded call's gradients are handed on"
            return False
        found = self.tracker.add(out, "temporary", "")
        block.slots[found] = slots[0]
        return True

    @contextlib.contextmanager
    def on(self) -> Iterator[Folding]:
        """Folds calls inside the block; to be entered once, since the fake tensors are dropped at its end."""
        self.recorder.watcher = self.watch
        self.tracker.bridge = self
        try:
            yield self
        finally:
            self.recorder.watcher = None
            self.tracker.bridge = None
            del self.anchor
            self.remove()

    def remove(self) -> None:
        """Restores the modules' own forwards."""
        while self._placed:
            module, before = self._placed.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before


class _FoldedForward:
    """A folded module's forward during a capture."""

    def __init__(self, loop: Loop, module: nn.Module) -> None:
        self._loop = loop
        before = module.__dict__.get("forward")
        self.__wrapped__ = before if before is not None else type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop.run(self.__wrapped__, args, kwargs)


def _is_free_of_hooks(module: nn.Module) -> bool:
    """Whether the module and its submodules have no hooks but those of the recorder of calls."""
    return all(
        not m._backward_hooks
        and not m._backward_pre_hooks
        and (m is module or (len(m._forward_hooks) == 1 and len(m._forward_pre_hooks) == 1))
        for _, m in walk(module)
    )
