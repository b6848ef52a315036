"""The recorder of a step under a plan that only rederives, which tells of the ops it sees."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from recoup import _torch
from recoup.runtime.rebuild.call_log import CallLog
from recoup.runtime.rebuild.chain_search import MAX_OPS
from recoup.runtime.rebuild.cheap_ops import VIEW, OpFacts, known_facts, op_facts, written_by
from recoup.runtime.rebuild.kept import Kept
from recoup.runtime.rebuild.lineage import Recorder
from recoup.runtime.rebuild.marks import Frame, reads_masks
from recoup.runtime.rebuild.values import Value
from recoup.thresholds import SMALL_BYTES


@_torch.without_dynamo_wrapper
class WatchedRecorder(Recorder):
    """A recorder that tells of the ops it sees. `log`: of the call that is looked into now. `calls`: the plan's."""

    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.calls = calls
        self.frame = Frame("", None, [])
        self.log: CallLog | None = None
        self.stop_program: Any = None
        self.on_write: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_wrapped = bool(types) and any(map(_torch.is_wrapper_type, types))
        facts = known_facts(id(func))
        if facts is None and not _torch.is_higher_order(func):
            facts = op_facts(func)
        if self.log is not None and (is_wrapped or not _follows(facts, args)):
            self.log.ops = None
        if self.learning is not None and not self.learning.is_open and (facts is None or facts.kind != VIEW):
            self.learning.failed = True  # by code that is no call: what it does in another step nobody would see
        if self.on_write is not None and not is_wrapped and (written := written_by(facts, args, kwargs)):
            self.on_write(written)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def pack(self, tensor: torch.Tensor, value: Value) -> Any | None:
        """Keeps what is small and made of nothing where sizes vary, since how large it is is a number of its op."""
        learning = self.learning
        if learning is None or not learning.keeps_lists or tensor.nbytes > SMALL_BYTES or not _is_list(value):
            return None
        kept = Kept(tensor)
        value.kept = weakref.ref(kept)
        return kept


def _is_list(value: Value) -> bool:
    """Whether a short chain of ops makes a value of nothing, as positions and masks of a length are made."""
    stack, num_ops = [value], 0
    while stack:
        made = stack.pop().made
        num_ops += 1
        if made is None or num_ops > MAX_OPS:
            return False
        stack += [read.value for read in made.reads]
    return True


def _follows(facts: OpFacts | None, args: tuple[Any, ...]) -> bool:
    """Whether the metadata of an op's results follow from its arguments' metadata."""
    if facts is None or facts.changes_size:
        return False
    return not facts.has_dynamic_shape or (facts.gathers and not reads_masks(args))
