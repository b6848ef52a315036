"""The action *rederive*: saved tensors that cheap ops can rebuild from others that are kept anyway are not kept.

At pack time the `Recorder` is asked how the tensor came to be. If a short chain of cheap ops leads to it from tensors
that autograd already keeps (or from parameters), autograd gets a `Rederived` instead: the chain, and the kept tensors
it starts from. At unpack time the chain runs, once for all who wait for one of its results. A dropout mask of zeros
and one constant is kept as bytes.

The idea is the output-discarding of Megatron-LM and the cheap-op rule of torch.compile's min-cut partitioner, for eager
mode and with no list of modules. Guarantees: the same kernels on the same bits, so the same bits; no matmul,
convolution, attention or random op runs twice; a tensor changed in place after it was saved raises, as in autograd.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.offload.offloaded_saved_tensor import KeptElsewhere, Returning
from recoup.runtime.rebuild import shortcuts
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.lineage import Geometry, Made, Read, Recorder, Value, current_recorder, geometry_of
from recoup.runtime.recompute.spot_check import read_bytes
from recoup.runtime.waiting import Waiting

MIN_BYTES = 4096
MAX_OPS = 14
SOON = 64
"""Turns within which backward asks for a rebuilt tensor again: until then it is held. A skip that a decoder rebuilt is
wanted by the encoder too, but much later; holding it would undo the saving."""
MAX_TRAFFIC_RATIO = 40.0
_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{tensor}] is {versions}. It was saved, or is what a saved tensor is rederived from; clone it before changing it."
)
_BY_DATA = "another one since it was used, changed through `.data`"


def changed_since(what: str) -> RuntimeError:
    """Returns autograd's error for a tensor that was changed in place and cannot be rebuilt from any more."""
    return RuntimeError(_CHANGED.format(tensor=what, versions="overwritten since"))


class Kept:
    """A saved tensor that is kept as it is."""

    __slots__ = ("__weakref__", "copy", "is_source", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # With its node it would be a cycle: a saved output is held by the node that made it.
        self.tensor = tensor if tensor.grad_fn is None else _torch.detach_past_modes(tensor)
        self.version = tensor._version
        self.is_source = False
        self.copy: torch.Tensor | None = None
        execution_context.kept(tensor)

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved, as autograd would."""
        if self.tensor._version != self.version:
            _check_version(self.tensor, self.version)
        return self.tensor

    def contents(self) -> torch.Tensor:
        """Returns what something is rebuilt from."""
        return self.unpack() if self.copy is None else self.copy

    def rescue(self) -> None:
        """Called before it is overwritten: copies the storage if something is to be rebuilt from it."""
        if self.is_source and self.copy is None:
            size, stride, offset, _ = geometry_of(self.tensor)
            num_elements = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
            whole = self.tensor.detach().as_strided((num_elements,), (1,), 0)  # `set_` is refused by fake tensors
            self.copy = whole.clone().as_strided(size, stride, offset)

    def is_rescued(self) -> bool:
        """Whether it holds what was saved, whatever was written since."""
        return self.copy is not None

    def is_current(self) -> bool:
        """Whether it still holds what was saved."""
        return self.copy is not None or self.tensor._version == self.version


class KeptView:
    """A saved tensor that lies over the same storage as one that is kept."""

    __slots__ = ("geometry", "kept")

    def __init__(self, kept: Kept, geometry: Geometry) -> None:
        self.kept = kept
        self.geometry = geometry

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved."""
        return laid(self.kept.unpack(), self.geometry)


class KeptCompact:
    """A tensor whose values fit a smaller dtype: a random mask of zeros and ones, the indices of a max-pooling."""

    __slots__ = ("__weakref__", "base", "narrow")

    def __init__(self, narrow: torch.Tensor, base: Geometry) -> None:
        self.narrow = narrow
        self.base = base
        execution_context.kept(narrow)

    def contents(self) -> torch.Tensor:
        """Returns it in its own dtype and layout."""
        size, stride, _, dtype = self.base
        wide = torch.empty_strided(size, stride, dtype=dtype, device=self.narrow.device)
        return wide.copy_(self.narrow)

    def rescue(self) -> None:
        """Nothing to do: nobody else can write to it."""

    def is_rescued(self) -> bool:
        """Always."""
        return True

    def is_current(self) -> bool:
        """Always: nobody else holds it."""
        return True


Source = Kept | KeptCompact | KeptElsewhere


class Rederived:
    """A saved tensor that will be rebuilt: a value, where it starts from, and the geometry it is wanted in."""

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
        if self.value.overwritten:
            size, _, _, dtype = self.geometry
            raise changed_since(f"{dtype} {list(size)}")
        if self._under.are_here():
            return self._rebuild()
        with self._under.again():
            return self._rebuild()

    def _rebuild(self) -> torch.Tensor:
        with _torch.below_autocast_and_autograd(), execution_context.recomputing(), paused():
            tensor = _one_op(self.value)
            if tensor is None:
                tensor = _Rebuild(self.value, self.turn).contents(self.value)
            self._waiting.serve(self._ticket)
            for block, ticket in self._blocks:
                block.waiting.serve(ticket)
            execution_context.count("num_rederived", self._counts)
            self._waiting.hold(tensor, since=self.turn - SOON)
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


def _check_version(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        versions = f"at version {tensor._version}; expected version {version}"
        raise RuntimeError(_CHANGED.format(tensor=f"{tensor.dtype} {list(tensor.shape)}", versions=versions))


def constant_contents(value: Value) -> torch.Tensor:
    """Returns the contents of a parameter; raises if it was changed since, also where its version does not tell."""
    constant = value.constant
    assert constant is not None
    _check_version(constant, value.constant_version)
    is_elsewhere = constant.untyped_storage()._cdata != value.constant_storage
    if (is_elsewhere and not _torch.is_sharded_parameter(constant)) or (
        value.constant_bytes and read_bytes(constant) != value.constant_bytes
    ):
        raise RuntimeError(_CHANGED.format(tensor=f"{constant.dtype} {list(constant.shape)}", versions=_BY_DATA))
    return constant.detach()


def laid(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Returns the storage of `tensor` seen with another geometry."""
    size, stride, offset, dtype = geometry
    if tensor.dtype != dtype:  # the same bytes read otherwise (`view_as_real`): the whole storage, however it lies
        unit = max(tensor.dtype.itemsize, dtype.itemsize)
        num = tensor.untyped_storage().nbytes() // unit * unit // tensor.dtype.itemsize
        tensor = tensor.as_strided((num,), (1,), 0).view(dtype)
    if tensor.size() == size and tensor.stride() == stride and tensor.storage_offset() == offset:
        return tensor
    return tensor.as_strided(size, stride, offset)


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
        self._since = turn - SOON
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
        """Counts a read off, after the op that read: until then an op further out may hold the tensor too."""
        left = self._uses[id(value)] = self._uses.get(id(value), 1) - 1
        if left <= 0:
            self._made.pop(id(value), None)


def fitted(tensor: torch.Tensor, base: Geometry) -> torch.Tensor:
    """Returns the tensor laid out as the first time."""
    if geometry_of(tensor) == base:
        return tensor
    size, stride, _, dtype = base
    return torch.empty_strided(size, stride, dtype=dtype, device=tensor.device).copy_(tensor)


def _at_hand(value: Value) -> bool:
    return value.constant is not None or value.rebuilt() is not None or value.alive() is not None


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether the storage has its memory: FSDP takes a unit's parameters away when its forward ends.

    What is there when a tensor is saved is there when its unit runs backward: it belongs to the same unit, or stays.
    Not so under ZeRO-3, which marks its parameters and gathers each for its own module only.
    """
    if hasattr(tensor, "ds_id"):
        return False
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


class _Search:
    """Looks for a chain from kept tensors to a value, within a bound on ops and on bytes moved."""

    __slots__ = ("ops", "seen", "sources", "traffic_bytes")

    def __init__(self, traffic_bytes: float) -> None:
        self.ops = MAX_OPS
        self.traffic_bytes = traffic_bytes
        self.seen: set[int] = set()
        self.sources: list[Source] = []

    def reach(self, value: Value) -> bool:
        if id(value) in self.seen:
            return True
        if value.constant is not None:
            return value.constant._version == value.constant_version and _is_there(value.constant)
        kept = value.alive()
        if kept is not None:
            if isinstance(kept, Kept) and not _is_there(kept.tensor):
                return False
            self.sources.append(kept)
            self.seen.add(id(value))
            return True
        made = value.made
        if made is None:
            return False
        self.ops -= 1
        self.traffic_bytes -= made.traffic_bytes
        if self.ops < 0 or self.traffic_bytes < 0:
            return False
        self.seen.add(id(value))
        if not all(self.reach(read.value) for read in made.reads):
            return False
        if made.outputs and value.output == 0 and shortcuts.has_shortcut(op_facts(made.function), made.args):
            self._hold_side_results(made)
        return True

    def _hold_side_results(self, made: Made) -> None:
        """Has the op's other results held for as long as the first may be asked for, if they are kept at all."""
        values = [ref() for ref in made.outputs[1:]]
        kept = [k for k in (value.alive() for value in values if value is not None) if k is not None]
        if len(kept) == len(values):
            self.sources += kept
            made.side_results = tuple(weakref.ref(k) for k in kept)


def pack(tensor: torch.Tensor) -> Any:
    """What autograd gets instead of `tensor`: `Kept`, a view of one, `Rederived`, or, offloaded, `Returning`."""
    with _torch.past_function_modes():
        return _pack(tensor)


def _pack(tensor: torch.Tensor) -> Any:
    recorder = current_recorder()
    if (
        recorder is None
        or (type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter))
        or tensor.layout is not torch.strided
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        return Kept(tensor)
    value = recorder.value_of(tensor)
    if value.constant is not None:
        return Kept(tensor)
    recorder.turn += 1
    made = value.made
    num_bytes = tensor.numel() * tensor.dtype.itemsize
    alive = value.alive() if value.kept is not None else None
    if alive is not None:
        geometry = geometry_of(tensor)
        # One Kept per value: whoever rebuilds from it must find it, however long other savers of it live.
        if isinstance(alive, KeptCompact):
            return Rederived(value, geometry, [alive], recorder)
        if isinstance(alive, KeptElsewhere):
            return Returning(alive, geometry)
        execution_context.kept(tensor)
        return alive if geometry_of(alive.tensor) == geometry else KeptView(alive, geometry)
    packed = recorder.pack(tensor, value)
    if packed is not None:
        return packed
    if (
        made is not None
        and num_bytes >= MIN_BYTES
        and recorder.deriving
        and recorder.is_cheap
        and value.base is not None
        and value.base[3] == tensor.dtype
    ):
        sources: list[Source] | None
        if shortcuts.keeps_indices(op_facts(made.function), made.args, value.output, tensor):
            sources = [_compact_indices(value, tensor)]
        else:
            sources = _find_sources(value, num_bytes)
        if sources is None:
            mask = _compact_mask(value, made, tensor)  # only weakly held until it is among the sources
            if mask is not None:
                sources = _find_sources(value, num_bytes)
        if sources is not None:
            execution_context.rederived(tensor, [t for t in map(on_device, sources) if t is not None])
            return Rederived(value, geometry_of(tensor), sources, recorder)
    if recorder.offloading and recorder.offloader is not None:
        with paused(), execution_context.recomputing(), _torch.below_autocast_and_autograd():
            elsewhere = recorder.offloader.take(value, tensor)
        if elsewhere is not None:
            value.kept = weakref.ref(elsewhere)
            return Returning(elsewhere, geometry_of(tensor))
    kept = Kept(tensor)
    value.kept = weakref.ref(kept)
    return kept


def on_device(source: Source) -> torch.Tensor | None:
    """Returns the tensor that a source keeps on the device, None if it was moved away."""
    if isinstance(source, KeptElsewhere):
        return None
    return source.narrow if isinstance(source, KeptCompact) else source.tensor


def _find_sources(value: Value, num_bytes: int) -> list[Source] | None:
    search = _Search(MAX_TRAFFIC_RATIO * num_bytes)
    return search.sources if search.reach(value) else None


def _compact_mask(value: Value, made: Made, tensor: torch.Tensor) -> KeptCompact | None:
    """Returns the random mask that `tensor` was scaled from, as bytes, and makes it the mask's kept contents."""
    if len(made.reads) != 1 or not made.reads[0].value.random_mask or tensor.dtype == torch.bool:
        return None
    read = made.reads[0]
    source, base = read.value, read.value.base
    if base is None or read.geometry != base or base[0] != tensor.size() or value.base != geometry_of(tensor):
        return None
    with paused(), execution_context.recomputing(), _torch.below_autocast_and_autograd():
        if not shortcuts.shows_mask(made, tensor.dtype):
            return None
        mask = KeptCompact(tensor.detach() != 0, base)
    source.kept = weakref.ref(mask)
    return mask


def compact_mask(value: Value, tensor: torch.Tensor) -> KeptCompact:
    """Returns a random mask of zeros and ones as bytes.

    Args:
        value: the mask's, whose base is known. tensor: the mask itself.
    """
    assert value.base is not None
    with paused(), execution_context.recomputing(), _torch.below_autocast_and_autograd():
        return KeptCompact(tensor.detach().to(torch.bool), value.base)


def _compact_indices(value: Value, tensor: torch.Tensor) -> KeptCompact:
    """Returns the indices of a max-pooling in four bytes each, and makes that their kept contents."""
    with paused(), execution_context.recomputing(), _torch.below_autocast_and_autograd():
        compact = KeptCompact(tensor.detach().to(torch.int32), geometry_of(tensor))
    value.kept = weakref.ref(compact)
    return compact


def unpack(packed: Any) -> torch.Tensor:
    """What autograd gets back in backward."""
    with _torch.past_function_modes():
        result: torch.Tensor = packed.unpack()
    return result


@contextlib.contextmanager
def rederive(*, by_default: bool = True) -> Iterator[None]:
    """Keeps less for backward, in everything that runs inside: forward and loss of a training step.

    Needs no plan and no sample batch. Gradients are bit for bit those of plain training. Backward may run inside or
    outside. Under `no_grad` it costs next to nothing.

    Args:
        by_default: False only records and keeps, for an applied plan whose decisions turn it on further in.

    Example:
        ```python
        with recoup.rederive():
            loss = model(inputs)
        loss.backward()
        ```
    """
    if _torch.inside_transform():  # torch.func refuses saved-tensor hooks; it runs as plain autograd
        yield
        return
    if not torch.is_grad_enabled():
        yield
        return
    with Recorder() as recorder, _torch.saved_tensors_hooks(pack, unpack):
        recorder.deriving = by_default
        yield
