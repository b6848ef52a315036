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
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.offload.offloaded_saved_tensor import KeptElsewhere, Returning
from recoup.runtime.rebuild import shortcuts
from recoup.runtime.rebuild.chain_search import find_sources
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.kept import Kept, KeptCompact, KeptConstant, Source, on_device, unpacked
from recoup.runtime.rebuild.lineage import Recorder, current_recorder
from recoup.runtime.rebuild.rederived import Rederived, paused
from recoup.runtime.rebuild.values import Geometry, Value, geometry_of

MIN_BYTES = 4096  # smaller saved tensors are kept: a rebuild takes some 100 us whatever its size
_num_function_modes = _torch.num_function_modes  # asked for every saved tensor


def pack(tensor: torch.Tensor) -> Any:
    """Returns the object that autograd saves in place of `tensor`: `Kept`, `KeptView`, `Rederived` or `Returning`."""
    if _num_function_modes():  # inside of a user's `autograd.Function`
        with _torch.past_function_modes():
            return _pack(tensor)
    return _pack(tensor)


def _pack(tensor: torch.Tensor) -> Any:
    recorder = current_recorder()
    if recorder is not None and recorder.program is not None:
        packed = recorder.program.pack(recorder, tensor)
        if packed is not None:
            return packed
    packed = _recorded(recorder, tensor)
    if recorder is not None and not recorder.is_cheap:
        recorder.packed.append(weakref.ref(packed))
    return packed


def _recorded(recorder: Recorder | None, tensor: torch.Tensor) -> Any:
    if recorder is None:
        return Kept(tensor)
    value: Value | None = None
    if recorder.call is not None:
        recorder.call.saves(recorder, tensor)
    if (
        (type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter))
        or tensor.layout is not torch.strided
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        packed: Any = Kept(tensor)
    else:
        value = recorder.value_of(tensor)
        packed = _pack_value(recorder, tensor, value)
    if recorder.learning is not None:
        if tensor.layout is torch.strided:
            recorder.learning.saved(tensor, value, packed)
        else:
            recorder.learning.failed = True
    if recorder.call is not None:
        recorder.call.begin(recorder)
    return packed


def _pack_value(recorder: Recorder, tensor: torch.Tensor, value: Value) -> Any:
    if value.constant is not None:
        return KeptConstant(tensor)
    recorder.turn += 1
    alive = value.alive() if value.kept is not None else None
    if alive is not None:
        geometry = geometry_of(tensor)
        # One Kept per value: whoever rebuilds from it must find it, however long other savers of it live.
        if isinstance(alive, KeptCompact):
            return Rederived(value, geometry, [alive], recorder)
        if isinstance(alive, KeptElsewhere):
            return Returning(alive, geometry)
        execution_context.kept(tensor)
        return alive.saved_as(geometry)
    packed = recorder.pack(tensor, value)
    if packed is not None:
        return packed
    made = value.made
    num_bytes = tensor.nbytes
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
            indices = compact(tensor, torch.int32, geometry_of(tensor))
            value.kept = weakref.ref(indices)
            sources = [indices]
        else:
            sources = find_sources(value, num_bytes)
        if sources is None:
            with paused(), execution_context.recomputing(), _torch.below_autocast_and_autograd():
                shown = shortcuts.shown_mask(value, geometry_of(tensor))
            if shown is not None and shown.base is not None:
                mask = compact(tensor, torch.bool, shown.base)
                shown.kept = weakref.ref(mask)  # only weakly held until it is among the sources
                sources = find_sources(value, num_bytes)
        if sources is not None:
            if execution_context.observer() is not None:
                execution_context.rederived(tensor, [t for t in map(on_device, sources) if t is not None])
            return Rederived(value, geometry_of(tensor), sources, recorder)
    if recorder.offloading and recorder.offloader is not None:
        with paused(), execution_context.recomputing(), _torch.below_autocast_and_autograd():
            elsewhere = recorder.offloader.take(value, tensor)
        if elsewhere is not None:
            value.kept = weakref.ref(elsewhere)
            return Returning(elsewhere, geometry_of(tensor))
    kept = Kept(tensor)
    if not (value.is_passing or value.stays):
        value.kept = weakref.ref(kept)
    return kept


def compact(tensor: torch.Tensor, dtype: torch.dtype, base: Geometry) -> KeptCompact:
    """Returns a tensor kept in a smaller dtype; what is not zero becomes True.

    Args:
        tensor: itself, or what shows a random mask (`shortcuts.shown_mask`). base: how what is kept lies.
    """
    with paused(), execution_context.recomputing():
        # To bool: whether it is other than 0, six times as fast as `!=`.
        return KeptCompact(tensor.detach().to(dtype), base)


def keep(value: Value, tensor: torch.Tensor) -> Kept | KeptCompact:
    """Keeps a tensor's contents for who rebuilds from them; a random mask of zeros and ones as bytes."""
    if value.random_mask:
        assert value.base is not None
        kept: Kept | KeptCompact = compact(tensor, torch.bool, value.base)
    else:
        # Never a result itself: autograd gives it a node once the op has returned, and that node saves what is rebuilt
        # from here, a cycle that no collector sees. Below autograd a plain `detach` would count changes in place apart.
        kept = Kept(_torch.alias_below_autograd(tensor), is_saved=False)
    value.kept = weakref.ref(kept)
    return kept


def unpack(packed: Any) -> torch.Tensor:
    """Returns the tensor that `pack` was given, kept or rebuilt."""
    if _num_function_modes():
        with _torch.past_function_modes():
            return unpacked(packed)
    if type(packed) is not tuple:  # `unpacked`, without a call
        return packed.unpack()  # type: ignore[no-any-return]
    return packed[0] if packed[0]._version == packed[1] else unpacked(packed)


@contextlib.contextmanager
def rederive(*, by_default: bool = True) -> Iterator[None]:
    """Keeps less for backward, in everything that runs inside: forward and loss of a training step.

    Needs no plan and no sample batch. Gradients are bit for bit those of plain training. Backward may run inside or
    outside. Under `no_grad` it costs next to nothing; inside of compiled code it does nothing.

    Args:
        by_default: False only records and keeps, for an applied plan whose decisions turn it on further in.

    Raises:
        ReplayError: in backward, if something that a tensor would be rebuilt from was changed in place since.

    Example:
        >>> model, x = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 1)), torch.randn(256, 64)
        >>> with recoup.rederive():
        ...     loss = model(x).mean()
        >>> loss.backward()
    """
    if torch.compiler.is_compiling():  # the compiler decides what to save
        yield
        return
    # torch.func refuses saved-tensor hooks; it runs as plain autograd.
    if _torch.inside_transform() or not torch.is_grad_enabled():
        yield
        return
    with Recorder() as recorder, _torch.saved_tensors_hooks(pack, unpack):
        recorder.deriving = by_default
        yield
