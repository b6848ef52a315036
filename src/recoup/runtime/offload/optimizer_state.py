"""The optimizer's state on the host between steps: backward holds none of it on the device, `step` one bucket.

A step runs bucket by bucket: the state of a few parameters is copied in, the optimizer's own step runs for these
parameters only, their state is copied out. Numbered rules:

1. Only optimizers of `torch.optim` that update each parameter independently are supported, so that steps over subsets
   of the parameters equal one step over all, bit for bit. Others are refused.
2. Hooks, schedulers and a GradScaler see one step over all parameters: the user's `step` is called once. All buckets
   but the last run in a pre-hook that comes after every other; the last bucket is the step itself, ended by a
   post-hook that comes before every other.
3. Between steps `optimizer.state` contains tensors on the host. A step does not wait for the copies: any access to
   `optimizer.state` waits until they are done (`state_on_host.py`). A state dict that is loaded moves to the host
   right after.
4. The parameters of a bucket have at most as many bytes as the largest parameter.

prime-rl and DeepSpeed keep the state on the host as well; DeepSpeed also steps there, which rounds differently.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch

from recoup import _torch
from recoup.errors import UsageError
from recoup.runtime.offload.offloaded_saved_tensor import MIN_BYTES, Moves
from recoup.runtime.offload.state_on_host import FileHost, Host, NotedHost, PinnedHost, WaitingState
from recoup.units import format_bytes

_HOME = "recoup_offload"  # attribute of the patched `step`


class OptimizerOffload:
    """Keeps an optimizer's state on the host between steps until `remove()`, or the end of its `with` block.

    Attributes:
        moves: bytes moved so far, in both directions.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, host: Host, *, out: Iterable[tuple[torch.Tensor, str]] = ()
    ) -> None:
        """Moves the state that exists.

        Args:
            optimizer: the optimizer.
            host: where its state is kept.
            out: (parameter, name) of state that is on the host already, in the copy of an optimizer.
        """
        self.moves = Moves()
        self._optimizer = optimizer
        self._host = host
        self._is_on = True
        self._state: WaitingState | None = None  # replaces `optimizer.state` where copies are asynchronous
        self._there: dict[tuple[torch.Tensor, str], Any] = {}  # by (parameter, name): the host's value in the state
        self._in: list[torch.Tensor] = []  # parameters whose state is on the device now
        self._came: dict[tuple[torch.Tensor, str], Any] = {}  # the host's values of these
        self._groups = optimizer.param_groups
        self._members: list[tuple[dict[str, Any], list[torch.Tensor]]] = []  # the groups' parameters during a step
        for parameter, name in out:
            if name in optimizer.state.get(parameter, {}):
                self._leave(parameter, name, optimizer.state[parameter][name])
        try:
            self._leave_all()
        except BaseException:  # no memory there, or Ctrl-C: nothing was changed
            self._bring_all()
            raise
        former = optimizer.step
        self._former, self._before_us = former, optimizer.__dict__.get("step")

        @functools.wraps(former)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(*args, **kwargs)

        setattr(step, _HOME, self)
        self._patched = optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        self._loaded = optimizer.register_load_state_dict_post_hook(lambda _: self._leave_all())

    def __repr__(self) -> str:
        where = f"{format_bytes(self.host_bytes)} on the host" if self._is_on else "removed"
        return f"<OptimizerOffload: {type(self._optimizer).__name__}, {where}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    @property
    def host_bytes(self) -> int:
        """Bytes of optimizer state on the host."""
        return sum(there.nbytes for _, there in self.places())

    def places(self) -> Iterator[tuple[tuple[torch.Tensor, str], Any]]:
        """Yields ((parameter, name), value in the state) for each tensor on the host."""
        for (parameter, name), there in self._there.items():
            if dict.get(self._optimizer.state, parameter, {}).get(name) is there:
                yield (parameter, name), there

    def remove(self) -> None:
        """Moves the state back to the device and restores the optimizer's own `step`; may be called twice."""
        if not self._is_on:
            return
        self._is_on = False
        self._bring_all()
        if self._state is not None and self._optimizer.state is self._state:
            self._optimizer.state = self._state.removed()
        self.forget()
        self._loaded.remove()
        if self._optimizer.__dict__.get("step") is not self._patched:
            return  # a scheduler wrapped it since; its wrapper calls ours, which now calls the original
        if self._before_us is None:
            del self._optimizer.step
        else:
            self._optimizer.step = self._before_us  # type: ignore[method-assign]

    def forget(self) -> None:
        """Frees the memory on the host."""
        self._there.clear()

    # -- a step ------------------------------------------------------------------------------------------------------

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_on:
            return self._former(*args, **kwargs)
        optimizer = self._optimizer
        hooks = [
            optimizer.register_step_pre_hook(self._before),
            _torch.register_first_post_hook(optimizer, self._after),
        ]
        try:
            return self._former(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            self._after()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Pre-hook: evaluates a closure, runs every bucket but the last, and copies the last one in."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        if self._state is not None:
            self._state.host = None
        self._groups = optimizer.param_groups
        self._members = [(group, group["params"]) for group in self._groups]
        for number, (group, members) in enumerate(list(self._buckets())):
            if number:
                _torch.step_without_hooks(optimizer)
                self._out()
            optimizer.param_groups = [group]
            group["params"] = self._in = members
            for parameter in members:
                for name in list(optimizer.state.get(parameter, {})):
                    there = self._there.get((parameter, name))
                    if there is not None and optimizer.state[parameter][name] is there:
                        self._bring(parameter, name, there)
                        self._came[parameter, name] = there
        return args, kwargs

    def _after(self, *_: Any) -> None:
        """Post-hook: ends the last bucket, or one that failed, and restores the parameter groups."""
        if self._members:
            members_of, self._members = self._members, []
            for group, members in members_of:
                group["params"] = members
            self._optimizer.param_groups = self._groups
            self._out()
            self._host.finish()
        if self._state is not None:
            self._state.host = self._host

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Yields (group, parameters with a gradient) of each bucket (rule 4)."""
        most = max((p.nbytes for _, members in self._members for p in members), default=0)
        for group, members in self._members:
            bucket: list[torch.Tensor] = []
            for parameter in members:
                if parameter.grad is None:
                    continue
                if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > most:
                    yield group, bucket
                    bucket = []
                bucket.append(parameter)
            if bucket:
                yield group, bucket

    # -- copies ------------------------------------------------------------------------------------------------------

    def _out(self) -> None:
        """Copies the state that is on the device to the host."""
        parameters, self._in = self._in, []
        self._leave_those(parameters)
        self._came.clear()

    def _leave_all(self) -> None:
        self._leave_those([p for group in self._optimizer.param_groups for p in group["params"]])
        self._host.finish()
        if self._host.is_behind and self._optimizer.state is not self._state:
            self._state = self._optimizer.state = WaitingState(self._optimizer.state, self._host)

    def _leave_those(self, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            for name, value in list(self._optimizer.state.get(parameter, {}).items()):
                if value is not self._there.get((parameter, name)) and _is_movable(value, parameter):
                    self._leave(parameter, name, value)

    def _leave(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        there = self._host.leave(value, self._came.pop((parameter, name), None))
        self._optimizer.state[parameter][name] = self._there[parameter, name] = there
        self.moves.bytes_out += value.nbytes
        self.moves.num_blocks += 1

    def _bring_all(self) -> None:
        for (parameter, name), there in list(self.places()):
            self._bring(parameter, name, there)
        self._host.finish()

    def _bring(self, parameter: torch.Tensor, name: str, there: Any) -> None:
        self._optimizer.state[parameter][name] = self._host.back(there, parameter.device)
        self.moves.bytes_back += there.nbytes


def _is_movable(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value is a tensor on its parameter's device, with a storage of its own, and large enough to move."""
    return (
        isinstance(value, torch.Tensor)
        and value.device == parameter.device
        and value.layout is torch.strided
        and value.nbytes >= MIN_BYTES
        and value.nbytes == value.untyped_storage().nbytes()
    )


def offload_optimizer(optimizer: torch.optim.Optimizer, *, host: Host | None = None) -> OptimizerOffload:
    """Keeps an optimizer's state on the host between its steps; the results of each step are bit-equal.

    The device holds none of it in forward and backward, and the state of a few parameters at a time during the step.
    Plans made with this optimizer count that: `predicted.host_bytes` includes the state. Existing state moves at once,
    state that does not exist yet when the optimizer creates it.

    Args:
        optimizer: one of `torch.optim`, except LBFGS.
        host: where the state is kept; default: pinned memory for a GPU, unnamed files in the temporary directory for a
            CPU.

    Returns:
        A handle, also a context manager: `remove()` ends it, `moves` has the bytes moved so far.

    Raises:
        UsageError: if the optimizer's step cannot be run for some of its parameters only. Nothing was changed.

    Example:
        >>> model = torch.nn.Linear(512, 512)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with recoup.offload_optimizer(optimizer) as offload:
        ...     model(torch.ones(4, 512)).sum().backward()
        ...     optimizer.step()
        ...     print(offload.host_bytes >> 20, "MiB on the host")
        2 MiB on the host
    """
    _check(optimizer)
    return OptimizerOffload(optimizer, host or _host_of(optimizer))


def offload_alike(optimizer: Any, rebuilt: torch.optim.Optimizer, new_of: Mapping[int, torch.Tensor]) -> None:
    """Offloads the state of a rebuilt optimizer where the user's is offloaded.

    Args:
        optimizer: the user's.
        rebuilt: its copy.
        new_of: the copy's parameters by `id` of the user's.
    """
    offload = find_offload(optimizer)
    if offload is not None:
        out = [(new_of[id(p)], name) for (p, name), _ in offload.places() if id(p) in new_of]
        OptimizerOffload(rebuilt, _host_of(rebuilt), out=out)


def _host_of(optimizer: torch.optim.Optimizer) -> Host:
    first = next(p for group in optimizer.param_groups for p in group["params"])
    if _torch.is_fake(first):
        return NotedHost()
    return PinnedHost() if first.device.type == "cuda" else FileHost()


def find_offload(optimizer: Any) -> OptimizerOffload | None:
    """Returns the `OptimizerOffload` of an optimizer; None if its state is not offloaded."""
    found = getattr(getattr(optimizer, "step", None), _HOME, None)
    is_its_own = isinstance(found, OptimizerOffload) and found._is_on and found._optimizer is optimizer
    return found if is_its_own else None


def state_on_device(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yields the values of an optimizer's state that are not on the host."""
    offload = find_offload(optimizer)
    away = {id(there) for _, there in offload.places()} if offload is not None else set()
    states = optimizer.state
    for state in dict.values(states) if isinstance(states, WaitingState) else states.values():
        yield {name: value for name, value in dict(state).items() if id(value) not in away}


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    where = "(recoup.runtime.offload.optimizer_state)"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"offload_optimizer takes a torch.optim.Optimizer; got {name}. {where}")
    if find_offload(optimizer) is not None:
        raise UsageError(f"The state of this {name} is on the host already: remove() what was returned then. {where}")
    code = inspect.unwrap(type(optimizer).step)
    if not code.__module__.startswith("torch.optim."):
        raise UsageError(
            f"{name}.step is code of {code.__module__}, which may update parameters together or hold its state "
            "elsewhere: run for some of them it could differ. offload_optimizer serves the optimizers of torch.optim; "
            f"for one inside a wrapper pass that one. {where}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS runs the training step again inside its own and reads its history there, so that its state cannot "
            f"be on the host meanwhile. Use another optimizer, or leave its state where it is. {where}"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise UsageError(
                f"{name}(differentiable=True) keeps its state in a graph, which needs it on the device. {where}"
            )
        for parameter in group["params"]:
            kind: Any = type(parameter)  # mypy does not know that a class is hashable
            if _torch.is_wrapper_type(kind):
                raise UsageError(
                    f"A parameter of {list(parameter.shape)} is a {kind.__name__}, and so is its state, "
                    "which has no place apart from its mesh. FSDP2 keeps both on the host itself: fully_shard(..., "
                    f"offload_policy=CPUOffloadPolicy()). {where}"
                )
