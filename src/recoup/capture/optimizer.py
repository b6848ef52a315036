"""The user's optimizer, rebuilt over other parameters, to know its state and its step's transients without touching it.

Nothing of the user's object is run or changed: it is made again from its class, its settings, its groups and its state
(copies of the shapes or the values). An attribute bound to it (the `step` that an LR scheduler puts there, hooks,
closures) is left behind. An optimizer that cannot be stepped this way has its state estimated, and the plan says so.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.errors import UsageError, first_line
from recoup.runtime.offload.optimizer_state import find_offload, offload_alike, state_on_device

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer]
Closure = Callable[[], torch.Tensor]

_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
_ATOMS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device)
_TINY_SIZE = 2  # elements along each dimension of the parameters that an estimate is taken from


def check_optimizer(optimizer: Any) -> None:
    """Raises UsageError unless it is an optimizer or an optimizer class."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return
    raise UsageError(
        f"optimizer must be a torch.optim.Optimizer or such a class; got {type(optimizer).__name__}. "
        "Pass e.g. optimizer=torch.optim.AdamW."
    )


def unwrapped(optimizer: OptimizerLike) -> OptimizerLike:
    """Returns the optimizer inside accelerate's or Lightning's wrappers, which only pass its calls on."""
    while not isinstance(optimizer, type):
        homes = {c.__module__.partition(".")[0] for c in type(optimizer).__mro__}
        held = vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer"))
        if homes.isdisjoint(_WRAPPERS) or not isinstance(held, torch.optim.Optimizer):
            break
        optimizer = held
    return optimizer


class OptimizerStep:
    """An optimizer over other parameters, its state made: it can be stepped like the user's in all but its first step.

    Attributes:
        optimizer: the rebuilt one, None if it cannot be stepped.
        estimated_bytes: of its state, where it cannot be stepped, 0 otherwise.
        note: what is estimated and why, "" if nothing is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, *, takes_closure: bool = False) -> None:
        self.optimizer = optimizer
        self.estimated_bytes = 0
        self.note = ""
        self._takes_closure = takes_closure

    def step(self, closure: Closure) -> None:
        """Runs one step; an optimizer that does not ask for a closure is given none.

        Args:
            closure: runs the training step again and returns its loss; run twice at most, then that loss is handed out
                again, and a line search ends.
        """
        if self.optimizer is None:
            return
        losses: list[torch.Tensor] = []

        def limited() -> torch.Tensor:
            if not losses[1:]:  # the second finds everything there that an optimizer holds between them
                losses.append(closure())
            return losses[-1]

        with _torch.without_global_optimizer_hooks():
            if self._takes_closure:
                self.optimizer.step(limited)  # type: ignore[arg-type]  # torch's hint says float, its docs a tensor
            else:
                self.optimizer.step()

    def forget(self) -> None:
        """Drops state and parameters at once: an optimizer is part of a reference cycle, which is collected late."""
        for optimizer in () if self.optimizer is None else (self.optimizer, *_parts(self.optimizer).values()):
            offload = find_offload(optimizer)
            if offload is not None:
                offload.forget()
            optimizer.state.clear()
            optimizer.param_groups.clear()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yields the tensors of its state, and of the optimizers it is made of, without those on the host."""
        if self.optimizer is not None:
            for optimizer in (self.optimizer, *_parts(self.optimizer).values()):
                yield from iterate_tensors(list(state_on_device(optimizer)))

    @property
    def host_bytes(self) -> int:
        """Bytes of its state that are on the host between steps."""
        offload = find_offload(self.optimizer)
        return 0 if offload is None else offload.host_bytes


def prepare_optimizer(
    optimizer: OptimizerLike,
    new_of: Mapping[int, nn.Parameter],
    parameters: list[nn.Parameter],
    *,
    foreach: bool,
    under: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> OptimizerStep:
    """Returns the optimizer over other parameters with its state made; those are changed by a step, without `.grad`s.

    Args:
        optimizer: an instance (its settings, groups and state are taken over) or a class (its defaults).
        new_of: new parameter by `id` of the old one.
        parameters: all new ones, for a class.
        foreach: use the multi-tensor implementation where the user left the choice open, as torch does on CUDA.
        under: what its first step is run in.

    Raises:
        UsageError: if none of its parameters is among the old ones.
    """
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, type) and not any(id(p) in new_of for p in _members(optimizer)):
        raise UsageError(
            f"None of the {type(optimizer).__name__}'s parameters belong to the model. Build it from its parameters()."
        )
    with under():
        made = _stepped(optimizer, new_of, parameters, foreach=foreach)
    if isinstance(made, OptimizerStep):
        return made
    estimate = OptimizerStep(None)
    estimate.estimated_bytes, source = _estimate(optimizer, new_of, parameters)
    name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    estimate.note = (
        f"the {name} step cannot be run apart from your training ({type(made).__name__}: {first_line(made)}): its "
        f"state is estimated from {source}, and its step's temporaries are not counted"
    )
    return estimate


def _stepped(
    optimizer: OptimizerLike, new_of: Mapping[int, nn.Parameter], parameters: list[nn.Parameter], *, foreach: bool
) -> OptimizerStep | Exception:
    """Returns the optimizer after its first step, by the plainest way of asking for one that it accepts."""
    first: Exception | None = None
    asks = inspect.signature(optimizer.step).parameters.get("closure") if isinstance(optimizer, type) else None
    if not isinstance(optimizer, type):
        asks = inspect.signature(type(optimizer).step).parameters.get("closure")
    must = asks is not None and asks.default is inspect.Parameter.empty
    for takes_closure in (True,) if must else (False, True):
        for sparse in (False, True):
            try:
                with _torch.settings_put_back_on_error():
                    with _torch.without_global_optimizer_hooks():
                        rebuilt = _rebuild(optimizer, new_of, parameters, foreach=foreach)
                        offload_alike(optimizer, rebuilt, new_of)
                    made = OptimizerStep(rebuilt, takes_closure=takes_closure)
                    _prime(made, sparse=sparse)
                    return made
            except Exception as error:  # a class of the user's: whatever it raises, another way is tried
                first = first or error
    assert first is not None
    return first


def _prime(made: OptimizerStep, *, sparse: bool) -> None:
    """Runs a step so that the state is there."""
    assert made.optimizer is not None
    members = [p for p in _members(made.optimizer) if p.requires_grad]

    def closure() -> torch.Tensor:
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = _gradient(parameter, sparse=sparse)
        return torch.ones((), device=members[0].device)

    try:
        if members:
            closure()
            with ScalarsOfFakes():
                made.step(closure)
    finally:
        for parameter in members:
            parameter.grad = None


def _gradient(parameter: nn.Parameter, *, sparse: bool) -> torch.Tensor:
    if not sparse or parameter.dim() == 0:
        return torch.ones_like(parameter)
    row = torch.ones(1, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    index = torch.zeros(1, 1, dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(index, row, parameter.shape, check_invariants=False)


class ScalarsOfFakes(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Gives an optimizer that calls `.item()` on a fake tensor a value (0.5, 1 or False), so that its step goes on.

    Adafactor and ASGD scale by such values, NAdam divides by one less, LBFGS stops early by them; which tensors exist
    hardly depends on them.
    A state that was there before (Adam's `step`) keeps its single values, which a fake mode would not look at.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if not _torch.is_fake(args[0]):
                with _torch.without_dispatch_modes():
                    return func(*args)
            dtype = args[0].dtype
            return False if dtype is torch.bool else (0.5 if dtype.is_floating_point else 1)
        return func(*args, **(kwargs or {}))


# -- made again -------------------------------------------------------------------------------------------------------


def _rebuild(
    optimizer: OptimizerLike, new_of: Mapping[int, nn.Parameter], parameters: list[nn.Parameter], *, foreach: bool
) -> torch.optim.Optimizer:
    """Returns an optimizer of the same kind over other parameters, with copies of the state."""
    if isinstance(optimizer, type):
        wanted = [p for p in parameters if p.requires_grad]
        accepted = inspect.signature(optimizer).parameters
        options: dict[str, Any] = {}
        if "lr" in accepted and accepted["lr"].default is inspect.Parameter.empty:
            options["lr"] = 1e-3
        if foreach and "foreach" in accepted:
            options["foreach"] = True
        return optimizer(wanted, **options)
    groups = []
    for group in optimizer.param_groups:
        settings = {k: _copied(v, new_of) for k, v in group.items() if k != "params"}
        is_open = settings.get("foreach", False) is None and not settings.get("fused")
        if foreach and is_open and not isinstance(settings.get("lr"), torch.Tensor):
            settings["foreach"] = True
        members = [new_of[id(p)] for p in group["params"] if id(p) in new_of]
        if members:
            groups.append({"params": members, **settings})
    try:
        rebuilt = _constructed(optimizer, groups, new_of, parameters, foreach=foreach)
    except Exception:  # a constructor of the user's that wants more than its settings: its attributes tell the rest
        rebuilt = object.__new__(type(optimizer))
        torch.optim.Optimizer.__init__(rebuilt, groups, {k: _copied(v, new_of) for k, v in optimizer.defaults.items()})
        for name, value in vars(optimizer).items():
            copied = _copied(value, new_of)
            if name not in rebuilt.__dict__ and not hasattr(type(optimizer), name) and copied is not _LEFT:
                rebuilt.__dict__[name] = copied
    _copy_state(optimizer, rebuilt, new_of)
    for name, part in _parts(optimizer).items():
        other = vars(rebuilt).get(name)
        if isinstance(other, torch.optim.Optimizer):
            _copy_state(part, other, new_of)
    return rebuilt


def _constructed(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    new_of: Mapping[int, nn.Parameter],
    parameters: list[nn.Parameter],
    *,
    foreach: bool,
) -> torch.optim.Optimizer:
    """Returns `type(optimizer)(groups, ...)` with the settings that it was made with, as far as it remembers them."""
    kind, parts = type(optimizer), _parts(optimizer)
    first, *rest = list(inspect.signature(kind).parameters.values())
    known = {k: v for k, v in vars(optimizer).items() if isinstance(v, _ATOMS)} | optimizer.defaults
    options: dict[str, Any] = {}
    for parameter in rest:
        if parameter.name in parts:  # SAM and its kind take the class of their base optimizer
            options[parameter.name] = type(parts[parameter.name])
        elif parameter.name in known:
            options[parameter.name] = _copied(known[parameter.name], new_of)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in rest):
        taken = {name for part in parts.values() for name in inspect.signature(type(part)).parameters}
        more = {k: _copied(v, new_of) for k, v in optimizer.defaults.items() if not parts or k in taken}
        options = more | options
    if first.name in parts:  # Lookahead and its kind are handed an optimizer
        inner: Any = _rebuild(parts[first.name], new_of, parameters, foreach=foreach)
        return kind(inner, **options)
    return kind(groups, **options)


def _parts(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Returns the optimizers that one keeps as attributes."""
    return {k: v for k, v in vars(optimizer).items() if isinstance(v, torch.optim.Optimizer)}


def _members(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy_state(
    source: torch.optim.Optimizer, target: torch.optim.Optimizer, new_of: Mapping[int, nn.Parameter]
) -> None:
    for parameter, state in source.state.items():
        new = new_of.get(id(parameter))
        copied = _copied(state, new_of)
        if new is not None and state and isinstance(copied, dict):
            target.state[new] = copied


_LEFT = object()


def _copied(value: Any, new_of: Mapping[int, nn.Parameter]) -> Any:
    """Returns plain data anew: parameters as the new ones, tensors as copies; `_LEFT` for what is no data."""
    if isinstance(value, torch.Tensor):
        new = new_of.get(id(value))
        return new if new is not None else _copied_tensor(value, next(iter(new_of.values()), None))
    if isinstance(value, dict):
        pairs = {new_of.get(id(k), k): _copied(v, new_of) for k, v in value.items()}
        return {k: v for k, v in pairs.items() if v is not _LEFT}
    if isinstance(value, (list, tuple)):
        items = [_copied(v, new_of) for v in value]
        if any(item is _LEFT for item in items):
            return _LEFT
        return type(value)(items) if type(value) in (list, tuple) else _LEFT
    return value if isinstance(value, (*_ATOMS, type)) else _LEFT


def _copied_tensor(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """Returns the tensor's copy, or one without data beside fake parameters; single values keep theirs."""
    if like is None or not _torch.is_fake(like):
        return tensor.detach().clone()
    if tensor.numel() == 1 and tensor.device.type == "cpu":
        with _torch.without_dispatch_modes():
            return tensor.detach().clone()
    device = like.device if tensor.device.type == "meta" else tensor.device
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


# -- estimated --------------------------------------------------------------------------------------------------------


def _estimate(
    optimizer: OptimizerLike, new_of: Mapping[int, nn.Parameter], parameters: list[nn.Parameter]
) -> tuple[int, str]:
    """Returns the bytes of the state, and in words what they were taken from."""
    if not isinstance(optimizer, type):
        held = [t for o in (optimizer, *_parts(optimizer).values()) for s in o.state.values() for t in _tensors(s)]
        if held:
            return sum(t.numel() * t.dtype.itemsize for t in held), "its present state"
    with _torch.without_dispatch_modes():
        tiny = {
            id(p): nn.Parameter(torch.ones([min(s, _TINY_SIZE) for s in p.shape], dtype=p.dtype)) for p in parameters
        }
        of_old = {old: tiny[id(new)] for old, new in new_of.items() if id(new) in tiny}
        made = _stepped(optimizer, of_old, list(tiny.values()), foreach=False)
    full_of = {id(tiny[id(p)]): p for p in parameters}
    if isinstance(made, Exception) or made.optimizer is None:
        return 0, "nothing: it has none yet"
    members = _members(made.optimizer)
    share = sum(full_of[id(p)].numel() for p in members) / max(1, sum(p.numel() for p in members))
    total = 0
    for part in (made.optimizer, *_parts(made.optimizer).values()):
        for parameter, state in part.state.items():
            for tensor in _tensors(state):
                full = full_of.get(id(parameter))
                if full is not None and tensor.shape == parameter.shape:
                    total += full.numel() * tensor.dtype.itemsize
                elif tensor.numel() > 1:
                    total += int(tensor.numel() * share) * tensor.dtype.itemsize
    return total, "the first step of a small copy"


def _tensors(state: Any) -> list[torch.Tensor]:
    return list(iterate_tensors(dict(state) if isinstance(state, Mapping) else state))
