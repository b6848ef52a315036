"""Saved tensors that are rebuilt in backward: a chain of recorded ops is run again, from tensors that are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.offload.offloaded_saved_tensor import KeptElsewhere
from recoup.runtime.rebuild import shortcuts
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.kept import CHANGED, Kept, Source, changed_since, check_version, is_overwritten, laid
from recoup.runtime.rebuild.lineage import Recorder, current_recorder
from recoup.runtime.rebuild.values import Geometry, Made, Read, Value
from recoup.runtime.recompute.spot_check import read_bytes
from recoup.runtime.waiting import Waiting

SOON_TURNS = 64
"""Turns within which backward asks for a rebuilt tensor again: until then it is held. A skip that a decoder rebuilt is
wanted by the encoder too, but much later; holding it would undo the saving."""
_BY_DATA = "another one since it was used, changed through `.data`"


class Rederived:
    """A saved tensor that will be rebuilt: its value, the kept tensors its chain starts from, and its geometry."""

    __slots__ = (
        "__weakref__",
        "_blocks",
        "_counts",
        "_ticket",
        "_under",
        "_waiting",
        "geometry",
        "sources",
        "turn",
        "value",
    )

    def __init__(self, value: Value, geometry: Geometry, sources: Sequence[Source], recorder: Recorder) -> None:
        self._counts = execution_context.current_counts()
        self.turn = turn = recorder.turn
        self._under = recorder.surroundings()
        self.value = value
        self.geometry = geometry
        self.sources = sources
        if value.waiting is None:
            value.waiting = Waiting()
        self._waiting = value.waiting
        self._ticket = self._waiting.add(self, turn)
        for source in sources:
            if isinstance(source, Kept):
                source.is_source = True
        blocks = [source.block for source in sources if isinstance(source, KeptElsewhere)]
        self._blocks = [(block, block.waiting.add(self)) for block in blocks]

    def unpack(self) -> torch.Tensor:
        """Runs the chain and returns the tensor."""
        if self.value.overwritten and is_overwritten(self.value, self.geometry):
            size, _, _, dtype = self.geometry
            raise changed_since(f"{dtype} {list(size)}")
        if self._under.are_here():
            return self._rebuild()
        with self._under.again():
            return self._rebuild()

    def _rebuild(self) -> torch.Tensor:
        with rerunning():
            tensor = _one_op(self.value)
            if tensor is None:
                tensor = _Rebuild(self.value, self.turn).contents(self.value)
            self._waiting.serve(self._ticket)
            for block, ticket in self._blocks:
                block.waiting.serve(ticket)
            execution_context.count("num_rederived", self._counts)
            self._waiting.hold(tensor, since=self.turn - SOON_TURNS)
            return laid(tensor, self.geometry)


class paused:
    """Context manager: the recorder of this thread, if one is on, records nothing."""

    __slots__ = ("_recorder",)

    def __enter__(self) -> None:
        self._recorder = current_recorder()
        if self._recorder is not None:
            self._recorder.paused += 1

    def __exit__(self, *exc: object) -> None:
        if self._recorder is not None:
            self._recorder.paused -= 1


def rerunning() -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager inside of which recorded ops run again: as they ran then, and nobody records them."""
    if _torch.is_below_autocast_and_autograd() and current_recorder() is None:
        return execution_context.recomputing()  # itself, which runs no Python
    return _rerunning()


@contextlib.contextmanager
def _rerunning() -> Iterator[None]:
    with _torch.below_autocast_and_autograd(), execution_context.recomputing(), paused():
        yield


def constant_contents(value: Value) -> torch.Tensor:
    """Returns the contents of a parameter; raises if it was changed since, also where its version does not tell."""
    assert value.constant is not None
    return constant_of(value.constant)


def constant_of(constant: Constant) -> torch.Tensor:
    """Returns the contents of a parameter; raises as `constant_contents`."""
    if constant.copy is not None:
        return constant.copy
    tensor = constant.tensor
    if constant.is_as_read():
        return tensor.detach()
    check_version(tensor, constant.version)
    is_elsewhere = tensor.untyped_storage()._cdata != constant.storage
    if (is_elsewhere and not _torch.is_sharded_parameter(tensor)) or (
        constant.sample and read_bytes(tensor) != constant.sample
    ):
        raise RuntimeError(CHANGED.format(tensor=f"{tensor.dtype} {list(tensor.shape)}", versions=_BY_DATA))
    return tensor.detach()


def _one_op(value: Value) -> torch.Tensor | None:
    """Returns the contents by running the op that made them, if all it reads is at hand; else None.

    What `_Rebuild` does for longer chains, without its bookkeeping: most chains are one op.
    """
    rebuilt = value.rebuilt()
    if rebuilt is not None:
        return rebuilt
    made = value.made
    if made is None or value.base is None or not made.is_flat or made.outputs or value.alive() is not None:
        return None
    args = []
    for item in made.args:
        if type(item) is Read:
            source = item.value
            if source.constant is not None:
                tensor = constant_contents(source)
            else:
                found = source.rebuilt()
                if found is None:
                    kept = source.alive()
                    if kept is None:
                        return None
                    found = kept.contents().detach()
                tensor = found
            item = laid(tensor, item.geometry)
        args.append(item)
    out = made.function(*args)
    return fitted(out[value.output] if isinstance(out, (tuple, list)) else out, value.base)


class _Rebuild:
    """One run of a chain. Intermediates live until their last use here, longer only if others wait for them."""

    __slots__ = ("_made", "_since", "_uses")

    def __init__(self, value: Value, turn: int) -> None:
        self._since = turn - SOON_TURNS
        self._uses: dict[int, int] = {}
        self._made: dict[int, torch.Tensor] = {}
        pending = [value]
        while pending:
            current = pending.pop()
            if _at_hand(current) or current.made is None:
                continue
            for read in current.made.reads:
                seen = id(read.value) in self._uses
                self._uses[id(read.value)] = self._uses.get(id(read.value), 0) + 1
                if not seen:
                    pending.append(read.value)

    def contents(self, value: Value) -> torch.Tensor:
        """Returns the contents of `value`, running what has to be run."""
        if value.constant is not None:
            return constant_contents(value)
        found = self._made.get(id(value))
        if found is None:
            found = value.rebuilt()
        if found is not None:
            return found
        kept = value.alive()
        if kept is not None:
            contents: torch.Tensor = kept.contents().detach()
            return contents
        made = value.made
        if made is None or value.base is None:
            raise RuntimeError(
                "a saved tensor cannot be rederived: one of the tensors it comes from has been modified by an "
                "inplace operation since it was saved; clone that tensor before changing it."
            )
        tensor = self._run(made, value)
        if self._uses.get(id(value), 0) > 0:
            self._made[id(value)] = tensor
        if value.waiting is not None:
            value.waiting.hold(tensor, since=self._since)
        return tensor

    def _run(self, made: Made, value: Value) -> torch.Tensor:
        """Runs the op and returns the result that is `value`'s; others that are wanted soon are cached."""
        assert value.base is not None
        spare: list[torch.Tensor] = []
        args = self._decode(made.args, spare)
        kwargs = {key: self._decode((item,), spare)[0] for key, item in made.kwargs.items()}
        out: Any = None
        if spare:
            out = shortcuts.call_over(op_facts(made.function), args, kwargs, spare=spare, result=value.base)
            spare.clear()
        if out is None and value.output == 0 and made.side_results:
            side_results = [ref() for ref in made.side_results]
            if all(kept is not None and kept.is_current() for kept in side_results):
                contents = [kept.contents() for kept in side_results]  # type: ignore[union-attr]
                out = shortcuts.from_side_results(op_facts(made.function), args, contents)
        if out is None:
            out = made.function(*args, **kwargs)
        del args, kwargs
        for read in made.reads:
            self._used(read.value)
        if not isinstance(out, (tuple, list)):
            return fitted(out, value.base)
        for position, ref in enumerate(made.outputs):
            other = ref()
            if other is None or other is value or other.base is None or not other.waiting:
                continue
            if other.rebuilt() is None:
                other.waiting.hold(fitted(out[position], other.base), since=self._since)
        return fitted(out[value.output], value.base)

    def _decode(self, items: Any, spare: list[torch.Tensor]) -> list[Any]:
        """Returns `items` with reads replaced by tensors; those that nobody reads after are put in `spare` too."""
        result: list[Any] = []
        for item in items:
            if isinstance(item, Read):
                result.append(laid(self.contents(item.value), item.geometry))
                is_last = self._uses.get(id(item.value)) == 1 and id(item.value) in self._made
                if is_last and item.value.rebuilt() is None:
                    spare.append(self._made[id(item.value)])
            elif isinstance(item, (list, tuple)):
                result.append(self._decode(item, spare))
            else:
                result.append(item)
        return result

    def _used(self, value: Value) -> None:
        """Counts one read as done, after the op has run: until then an enclosing op may hold the tensor too."""
        left = self._uses[id(value)] = self._uses.get(id(value), 1) - 1
        if left <= 0:
            self._made.pop(id(value), None)


def fitted(tensor: torch.Tensor, base: Geometry) -> torch.Tensor:
    """Returns the tensor laid out as the first time."""
    if (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype) == base:
        return tensor
    size, stride, _, dtype = base
    return torch.empty_strided(size, stride, dtype=dtype, device=tensor.device).copy_(tensor)


def _at_hand(value: Value) -> bool:
    return value.constant is not None or value.rebuilt() is not None or value.alive() is not None
