"""Save, rederive and offload around a call: decisions about all tensors that autograd saves inside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from recoup.ir.decision import Decision, Offload
from recoup.runtime.patch import PatchedForward
from recoup.runtime.rebuild import saved_tensor
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.recompute.scope import inside_region


def run_under(decision: Decision, patched: PatchedForward, forward: Any, args: Any, kwargs: Any) -> Any:
    """Runs `forward` under the decision and returns its result."""
    with ambient(decision):
        return forward(*args, **kwargs)


@contextlib.contextmanager
def ambient(decision: Decision) -> Iterator[None]:
    """Turns rederive and offload on or off for all tensors saved inside, whichever saved-tensor hooks are on there."""
    recorder, rederives = current_recorder(), decision.rederives
    if recorder is not None:
        before = recorder.deriving, recorder.offloading
        recorder.deriving, recorder.offloading = rederives, isinstance(decision, Offload)
        if recorder.offloading and recorder.offloader is not None:
            recorder.offloader.begin_group()
        try:
            yield
        finally:
            recorder.deriving, recorder.offloading = before
    elif rederives and not inside_region():  # a part of the model run on its own
        with saved_tensor.rederive():
            yield
    else:
        yield
