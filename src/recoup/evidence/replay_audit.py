"""Whether second forwards give what first forwards gave: every tensor that a region saves, compared value by value.

During one step the tensors that regions would drop are kept beside them. Each replay's tensors are compared with
these, bit for bit, and the first that differs is named by module and op. Memory: what the plain step holds, for the
length of the step; it can be moved out of the device's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._allocation import HostRoom
from recoup._interrupts import let_in
from recoup.evidence.gradients import equal_values, in_host_memory, pieces
from recoup.runtime import execution_context
from recoup.runtime.offload.transport import Transport
from recoup.runtime.recompute.uninitialised import Uninitialised
from recoup.thresholds import SMALL_BYTES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A saved tensor whose second computation gave other values.

    Attributes:
        order: its place among all tensors saved in the step.
        region: path of the region.
        module: path of the module that saved it.
        op: the op that made it; "" if it came from outside of the region.
        largest: the largest absolute difference.
    """

    order: int
    region: str
    module: str
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    largest: float

    def __str__(self) -> str:
        made = f"`{self.op}` in `{self.module}`" if self.op else f"a tensor from outside, read in `{self.module}`"
        return (
            f"region `{self.region}`: its second forward gave other values, first from {made} "
            f"({self.dtype} {list(self.shape)}, by up to {self.largest:.3g})"
        )


class _Original:
    """A tensor saved in a first forward, and where it came from."""

    __slots__ = ("_handle", "audit", "dtype", "module", "op", "order", "shape", "tensor", "version")

    def __init__(self, audit: Audit, tensor: torch.Tensor) -> None:
        self.audit = audit
        # Normalisation updates its statistics, or instance norm a repetition of them, without telling their version,
        # after they were saved.
        is_updated = tensor.dim() == 1 or _address(tensor) in audit.buffers
        here = tensor.detach().clone() if is_updated else tensor.detach()
        self.version = tensor._version
        self.tensor: torch.Tensor | None = here
        self._handle: Any = None
        if audit.aside is not None and tensor.nbytes >= SMALL_BYTES and tensor.layout is torch.strided:
            self.shape, self.dtype = tensor.shape, tensor.dtype
            with torch.no_grad(), _torch.without_dispatch_modes():
                host = in_host_memory(here, audit.room)
                if tensor.device.type == "cpu":
                    self._handle, self.tensor = audit.aside.put(host.reshape(-1).view(torch.uint8)), None
                else:
                    self.tensor, self.version = host, host._version
        self.order = audit.num_kept
        self.op, self.module = audit.origin(tensor)

    def _contents(self) -> torch.Tensor:
        if self.tensor is not None:
            return self.tensor
        assert self.audit.aside is not None
        flat = self.audit.aside.get(self._handle)
        self._handle = None
        return flat.view(self.dtype).reshape(self.shape)

    def compare(self, again: torch.Tensor, region: str) -> None:
        """Compares `again` with the original, and notes a difference."""
        if self.tensor is not None and self.tensor._version != self.version:
            return  # changed in place since: the plain step would refuse it
        self.audit.num_compared += 1
        with torch.no_grad(), _torch.without_dispatch_modes():
            largest = self._largest_difference(again)
            if largest is None:
                return
        self.audit.divergences.append(
            Divergence(
                order=self.order,
                region=region,
                module=self.module,
                op=self.op,
                dtype=again.dtype,
                shape=tuple(again.shape),
                largest=largest,
            )
        )

    def _largest_difference(self, again: torch.Tensor) -> float | None:
        """Returns the largest absolute difference, None if all bits are equal; in pieces, as the device may be full."""
        first = self._contents()
        if first.layout is not torch.strided:
            return None if equal_values(first, again) else float("nan")
        found: float | None = None
        wide = torch.complex128 if again.is_complex() else torch.float64
        for one, other in zip(pieces(first), pieces(again), strict=True):
            other = other.to(one.device)
            if not equal_values(one, other):
                by = float((one.to(wide) - other.to(wide)).abs().nan_to_num(float("inf")).max())
                found = by if found is None else max(found, by)
        return found


class Audit(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Keeps what regions save and compares it with what their replays save.

    Attributes:
        divergences: what differed, as found.
        num_compared: tensors compared.
        coarsest: the floating dtype of the lowest precision among what ops returned.
        aside: where what is kept is moved to, None: it stays in memory. From a device it goes to host memory.
        room: the host's.
    """

    def __init__(self, model: nn.Module, aside: Transport | None = None) -> None:
        super().__init__()
        self.aside = aside
        self.room = HostRoom()
        self.coarsest: torch.dtype | None = None
        self._paths = {id(m): path for path, m in model.named_modules()}
        self.buffers = frozenset(_address(b) for b in model.buffers())
        self._modules: list[str] = []
        self._makers: dict[int, tuple[str, str]] = {}
        self._uninitialised = Uninitialised()
        self.divergences: list[Divergence] = []
        self.num_compared = 0
        self.num_kept = 0

    @property
    def first(self) -> Divergence | None:
        """The difference that comes first in the forward; regions are replayed last to first."""
        return min(self.divergences, key=lambda d: d.order, default=None)

    def keep(self, tensor: torch.Tensor) -> _Original | None:
        """Returns the tensor as it is now, to be compared later; None in a replay, and of what no kernel wrote."""
        if execution_context.is_recomputing() or self._uninitialised.holds(tensor):
            return None
        self.num_kept += 1
        return _Original(self, tensor)

    def origin(self, tensor: torch.Tensor) -> tuple[str, str]:
        """Returns the op and the module that made a tensor's contents."""
        here = self._modules[-1] if self._modules else ""
        return self._makers.get(_address(tensor), ("", here))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _torch.is_higher_order(func):
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # such questions must not raise
            let_in()
        if not execution_context.is_recomputing():
            self._uninitialised.note(func, args, kwargs or {}, out)
            here = self._modules[-1] if self._modules else ""
            outputs = out if isinstance(out, (tuple, list)) else (out,)
            for result, found in zip(func._schema.returns, outputs, strict=False):
                alias = result.alias_info
                if isinstance(found, torch.Tensor) and found.dtype is not self.coarsest and found.is_floating_point():
                    self._note_precision(found.dtype)
                if isinstance(found, torch.Tensor) and (alias is None or alias.is_write):
                    self._makers[_address(found)] = (func._schema.name.replace("::", "."), here)
        return out

    def _note_precision(self, dtype: torch.dtype) -> None:
        if self.coarsest is None or torch.finfo(dtype).eps > torch.finfo(self.coarsest).eps:
            self.coarsest = dtype

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Audits the steps that run inside of the `with` block."""
        modules = nn.modules.module

        def enter(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():  # Dynamo traces the branches of `torch.cond`
                return
            self._modules.append(self._paths.get(id(module), ""))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._modules and not torch.compiler.is_compiling():
                self._modules.pop()

        with contextlib.ExitStack() as stack:
            stack.callback(modules.register_module_forward_pre_hook(enter).remove)
            stack.callback(modules.register_module_forward_hook(leave, always_call=True).remove)
            stack.enter_context(execution_context.auditing(self))
            stack.enter_context(self)
            yield


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
