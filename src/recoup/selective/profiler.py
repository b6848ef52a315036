"""`MemoryProfiler`: what each layer keeps for backward and how long it takes, over several steps.

Bytes are counted twice, independently: from a captured step (`recoup.capture`), and in each run by saved-tensor hooks
over real tensors, storages told apart by address, parameters and batch left out. The spread over the runs is of the
second.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import iterate_tensors, map_tensors
from recoup.capture.capture import capture
from recoup.capture.snapshot import untouched
from recoup.capture.spec import StepSpec
from recoup.capture.step import Loss, Objective
from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.errors import UsageError
from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.ir.trace import Trace
from recoup.runtime.rebuild.kept import Simple, kept_simply, unpacked
from recoup.selective.layers import partition
from recoup.selective.profile_report import LayerProfile, ProfileReport


class MemoryProfiler:
    """Profiles a model's layers on a batch; nothing of the model changes.

    Args:
        model: any module; on `meta` its step is captured and not run.
        device: where it is ("cpu", "cuda"); None: the model's own.
        loss: `loss(output, batch)`, as in `recoup.plan`.

    Attributes:
        report: of the last `profile`, None before.
        sample_input: its batch.
    """

    def __init__(self, model: nn.Module, device: str | torch.device | None = None, *, loss: Loss | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"MemoryProfiler needs a torch.nn.Module; got {type(model).__name__}.")
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise UsageError(f"{type(model).__name__} has no parameters; there is no training step to profile.")
        try:
            asked = torch.device(device) if device is not None else parameter.device
        except RuntimeError as error:
            raise UsageError(f"Unknown device {device!r}: use 'cpu' or 'cuda'.") from error
        if parameter.device.type not in (asked.type, "meta"):
            raise UsageError(
                f"MemoryProfiler was asked for {asked}, and the model is on {parameter.device}. Move one to the other."
            )
        self.model = model
        self.device = parameter.device
        self.objective = Objective(loss=loss)
        self.report: ProfileReport | None = None
        self.sample_input: Any = None

    def profile(self, sample_input: Any, num_runs: int = 3) -> ProfileReport:
        """Runs `num_runs` steps (forward, loss, backward) and returns the report.

        Args:
            sample_input: a dict becomes `model(**sample_input)`, a tuple `model(*sample_input)`, else `model(it)`.

        Raises:
            UsageError: if `num_runs` is not at least 1.
            StepError: if the step fails.
        """
        if isinstance(num_runs, bool) or not isinstance(num_runs, int) or num_runs < 1:
            raise UsageError(f"num_runs must be a whole number of at least 1; got {num_runs!r}.")
        spec = StepSpec(
            model=self.model,
            batch=sample_input,
            objective=self.objective,
            dialect="cuda" if self.device.type == "cuda" else "cpu",
            round_bytes=MIN_BLOCK_BYTES if self.device.type == "cuda" else 1,
        )
        trace = capture(spec)
        paths = partition(self.model)
        runs: list[_Run] = []
        peak: int | None = None
        if self.device.type != "meta":
            with _state_restored(self.model):
                batch = _moved(sample_input, self.device)
                self._step(batch)  # the first one allocates and compiles what later ones find
                for _ in range(num_runs):
                    run = _Run(self.model, paths, self.device, batch)
                    with run:
                        self._step(batch, run)
                    runs.append(run)
                self._forget_gradients()  # else their release would count as the step's
                held = storage_bytes([*self.model.parameters(), *self.model.buffers(), *iterate_tensors([batch])])
                peak = measure_peak(lambda: self._step(batch), device=self.device, held_bytes=held)
        self.report = _report(self.model, trace, paths, runs, peak, str(self.device))
        self.sample_input = sample_input
        return self.report

    def recommend_layers(self, memory_budget_mb: float) -> list[str]:
        """Returns the layers whose activations exceed `memory_budget_mb` MiB each, largest first.

        The line is drawn for each layer; for a budget of the whole step use `recoup.plan`.

        Raises:
            UsageError: if nothing was profiled yet, or the number is negative.
        """
        if isinstance(memory_budget_mb, bool) or not isinstance(memory_budget_mb, (int, float)):
            raise UsageError(f"memory_budget_mb must be a number of MiB; got {memory_budget_mb!r}.")
        if not memory_budget_mb >= 0:
            raise UsageError(f"memory_budget_mb must not be negative; got {memory_budget_mb!r} MiB.")
        if self.report is None:
            raise UsageError("recommend_layers needs a profile: call profile(sample_input) first.")
        return self.report.over(memory_budget_mb)

    def _forget_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _step(self, batch: Any, run: _Run | None = None) -> None:
        self._forget_gradients()
        loss = self.objective.run(self.model, batch)
        if run is not None:
            run.end_forward()
        loss.backward()  # type: ignore[no-untyped-call]
        if run is not None:
            run.end_backward()


class _Run:
    """One run: seconds and saved bytes by layer."""

    def __init__(self, model: nn.Module, paths: list[str], device: torch.device, batch: Any) -> None:
        self._modules = [(p, model.get_submodule(p)) for p in paths]
        self._device = device
        self._known = {_key(t) for t in [*model.parameters(), *model.buffers(), *iterate_tensors([batch])]}
        self._seen: dict[int, torch.Tensor] = {}
        self._open: list[tuple[str, float]] = []
        self._handles: list[Any] = []
        self._stack = contextlib.ExitStack()
        self.seconds = dict.fromkeys(paths, 0.0)
        self.saved_bytes = dict.fromkeys(paths, 0)
        self.forward_seconds = self.backward_seconds = 0.0

    def __enter__(self) -> _Run:
        for path, module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._enter(path)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._stack.enter_context(_torch.saved_tensors_hooks(self._pack, unpacked))
        self._began = self._now()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        for handle in self._handles:
            handle.remove()
        self._seen.clear()

    def end_forward(self) -> None:
        self.forward_seconds = self._now() - self._began
        self._seen.clear()  # their storages must be free to go in backward
        self._began = self._now()

    def end_backward(self) -> None:
        self.backward_seconds = self._now() - self._began

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._open.append((path, self._now()))

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path, began = self._open.pop()
        self.seconds[path] += self._now() - began

    def _pack(self, tensor: torch.Tensor) -> Simple:
        key = _key(tensor)
        if self._open and key not in self._known and key not in self._seen:
            self._seen[key] = tensor.detach()  # while it is held its address is its own
            self.saved_bytes[self._open[-1][0]] += tensor.untyped_storage().nbytes()
        return kept_simply(tensor)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


@contextlib.contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    before = [(b, b.detach().clone()) for b in model.buffers()]
    with untouched(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)


def _moved(batch: Any, device: torch.device) -> Any:
    return map_tensors(lambda t: t.to(device), batch)


def _report(
    model: nn.Module, trace: Trace, paths: list[str], runs: list[_Run], peak: int | None, device: str
) -> ProfileReport:
    saved, freed, top = _captured(trace, paths)
    totals = [sum(run.saved_bytes.values()) for run in runs]
    both = [run.forward_seconds + run.backward_seconds for run in runs]
    levels = trace.levels()
    forward = [i for i, op in enumerate(trace.ops) if op.phase in ("forward", "loss")]
    backward = [i for i, op in enumerate(trace.ops) if op.phase == "backward"]
    total = sum(saved.values())
    layers = []
    for path in paths:
        times = [run.seconds[path] for run in runs]
        layers.append(
            LayerProfile(
                path=path,
                kind=type(model.get_submodule(path)).__name__,
                activation_bytes=saved[path],
                freed_bytes=freed[path],
                peak_bytes=top[path],
                forward_seconds=statistics.median(times) if times else 0.0,
                forward_spread=_spread(times),
                share=saved[path] / total if total else 0.0,
            )
        )
    layers.sort(key=lambda r: -r.activation_bytes)
    snapshots = [
        (f"after {trace.calls[i].path}", levels[min(trace.calls[i].last_op, len(levels)) - 1])
        for i in _calls_of(trace, paths)
    ]
    snapshots.append(("after forward", levels[forward[-1]]))
    snapshots.append(("after backward", levels[backward[-1]]))
    return ProfileReport(
        layers=tuple(layers),
        total_activation_bytes=total,
        measured_activation_bytes=round(statistics.mean(totals)) if totals else None,
        activation_spread=(max(totals) - min(totals)) / max(1, statistics.mean(totals)) if totals else 0.0,
        parameter_bytes=sum(s.nbytes for s in trace.storages if s.category == "parameter"),
        gradient_bytes=sum(s.nbytes for s in trace.storages if s.category == "gradient"),
        buffer_bytes=sum(s.nbytes for s in trace.storages if s.category in ("buffer", "outside")),
        peak_bytes=peak,
        forward_peak_bytes=max(levels[i] for i in forward),
        backward_peak_bytes=max(levels[i] for i in backward),
        forward_seconds=statistics.median(r.forward_seconds for r in runs) if runs else 0.0,
        backward_seconds=statistics.median(r.backward_seconds for r in runs) if runs else 0.0,
        time_spread=_spread(both),
        snapshots=tuple(snapshots),
        num_runs=len(runs),
        num_recomputed_ops=sum(1 for op in trace.ops if op.replayed),
        device=device,
    )


def _calls_of(trace: Trace, paths: list[str]) -> list[int]:
    wanted = set(paths)
    return [i for i, call in enumerate(trace.calls) if call.path in wanted]


def _captured(trace: Trace, paths: list[str]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Returns, by layer: bytes it saves first, bytes recomputing it frees, and the highest level in its forward."""
    owner: dict[int, str] = {}
    wanted = set(paths)
    for i, call in enumerate(trace.calls):
        above = owner.get(call.parent)
        if above is not None or call.path in wanted:
            owner[i] = above if above is not None else call.path
    saved, freed, top = dict.fromkeys(paths, 0), dict.fromkeys(paths, 0), dict.fromkeys(paths, 0)
    inputs: dict[str, set[int]] = {path: set() for path in paths}
    levels = trace.levels()
    for i in _calls_of(trace, paths):
        call = trace.calls[i]
        inputs[call.path].update(call.inputs)
        top[call.path] = max([top[call.path], *levels[call.first_op : call.last_op]])
    pinned = {path: set(indices) for path, indices in inputs.items()}
    for index, storage in enumerate(trace.storages):
        if storage.category != "saved" or not storage.saved_by:
            continue
        savers = {owner.get(c) for c in storage.saved_by}
        first = owner.get(storage.saved_by[0])
        if first is None:
            continue
        saved[first] += storage.nbytes
        if savers == {first} and index not in inputs[first]:
            freed[first] += storage.nbytes
    for path, indices in pinned.items():
        for index in indices:
            storage = trace.storages[index]
            if storage.category == "temporary":  # an input that only the region would keep
                freed[path] -= storage.nbytes
    return saved, {path: max(0, n) for path, n in freed.items()}, top


def _spread(values: list[float]) -> float:
    """Returns half the distance between the quartiles over the median."""
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0
