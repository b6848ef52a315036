"""An exception at any line of recoup ends the call, and leaves model, optimizer, process and training as they were."""

from __future__ import annotations

import copy
import dis
import gc
import itertools
import linecache
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup import _torch
from recoup.runtime import execution_context
from tests.safety.helpers import fakes_left

ROOT = str(Path(recoup.__file__).parent)
NUM_SIGNALS = 8
NUM_POINTS = int(os.environ.get("RECOUP_POINTS", "12"))  # of a function
CHILD_SECONDS = 200  # it hangs
SEED = int(os.environ.get("RECOUP_SEED", "2"))
LOG = "RECOUP_LOG" in os.environ  # each point is printed
# Between entering and leaving a context manager, and in what puts things back.
CRITICAL = {"start", "measure_peak", "untouched", "postponed", "_take_off", "__exit__", "unpatch", "restore"}
many = pytest.mark.skipif("RECOUP_POINTS" not in os.environ, reason="`make interrupts` runs these: minutes")


class Injected(KeyboardInterrupt):
    """Raised by the test at a line of recoup, as Ctrl-C would be."""


class InjectedError(RuntimeError):
    """Raised by the test at a line of recoup, as an op's error would be: recoup may know a way around it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)
        self.norm = nn.BatchNorm1d(48)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        return x + nn.functional.dropout(torch.tanh(self.norm(self.linear(x))), 0.1)


class Training:
    """A small training and everything about it that could be left changed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 48), Block(), Block(), nn.Linear(48, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.batch = (torch.randn(256, 16),)
        self.step()

    @staticmethod
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(*self.batch), self.batch).backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> list[Any]:
        """Returns all that a step can change."""
        model = self.model
        tensors = [*model.parameters(), *model.buffers(), *self.batch]
        found: list[Any] = [t.detach().clone() for t in tensors] + [
            p.grad if p.grad is None else p.grad.clone() for p in model.parameters()
        ]
        found += [copy.deepcopy(self.optimizer.state_dict()), self.scheduler.state_dict().copy()]
        found += [torch.get_rng_state(), random.getstate()]
        for module in model.modules():
            held = {k: len(v) if isinstance(v, (dict, list)) else None for k, v in vars(module).items()}
            found.append(held)
        return found


def process_state() -> list[Any]:
    """Returns what recoup could leave in the process."""
    return [
        torch.is_grad_enabled(),
        gc.isenabled(),
        gc.get_threshold(),
        execution_context.observer(),
        execution_context.is_recomputing(),
        execution_context.stand_in_transport(),
        _torch.thread_settings(),
        torch.autograd.profiler._is_profiler_enabled,
        list(warnings.filters),
        os.environ.get("KINETO_LOG_LEVEL"),
        signal.getsignal(signal.SIGINT),
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def differing(now: Any, before: Any) -> Any:
    """Returns what of two nests is not the same, by position."""
    if not (isinstance(now, (list, tuple)) and isinstance(before, (list, tuple)) and len(now) == len(before)):
        return now, before
    pairs = enumerate(zip(now, before, strict=True))
    return {place: differing(a, b) for place, (a, b) in pairs if not same(a, b)}


def calls(training: Training, plan: Any) -> dict[str, Callable[[], Any]]:
    model, batch = training.model, training.batch
    given: dict[str, Any] = {"loss": Training.loss, "optimizer": training.optimizer}
    return {
        "fit": lambda: recoup.fit(model, batch, budget="75%", timed=False, **given),
        "plan": lambda: recoup.plan(model, batch, budget="75%", **given),
        "profile": lambda: recoup.profile(model, batch, **given),
        "verify": lambda: recoup.verify(model, plan, batch, timed=False, **given),
    }


Line = tuple[CodeType, int]


class Lines:
    """Counts how often each line of recoup runs, and raises at one time of each target, in a fork of this process.

    The parent goes on as if nothing had happened, so that many points cost one run and what each of them undoes.
    """

    def __init__(self, targets: dict[Line, tuple[int, type[BaseException]]] | None = None) -> None:
        self.counts: Counter[Line] = Counter()
        self.raised: type[BaseException] | None = None  # in a fork: what was raised
        self.num_forked = 0
        self.failed: list[str] = []
        self._targets = targets or {}
        self._says = -1  # in a fork: where its parent listens

    def __enter__(self) -> Lines:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        locked: set[int] = set()  # lines of this call that took a lock

        def on_line(frame: Any, event: str, argument: Any) -> Any:
            self._on_line(frame, event, locked)
            return on_line

        return on_line

    def _on_line(self, frame: Any, event: str, locked: set[int]) -> None:
        if event == "line":
            line = (frame.f_code, frame.f_lineno)
            if line in self._targets and "lock:" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
                # A tracer can raise between a block and the release of its lock; Python lets no signal in there.
                if frame.f_lineno in locked:
                    return
                locked.add(frame.f_lineno)
            self.counts[line] += 1
            time, kind = self._targets.get(line, (0, Injected))
            if time == self.counts[line]:
                if _is_asked_by_torch(frame) or _begins_or_ends_to_handle(frame):
                    self._targets[line] = (time + 1, kind)
                else:
                    self._fork(line, time, kind)

    def _fork(self, line: Line, time: int, kind: type[BaseException]) -> None:
        code, number = line
        where = f"{kind.__name__} at {code.co_filename.removeprefix(ROOT)}:{number} ({code.co_name}), time {time}"
        reads, writes = os.pipe()
        numbers = random.getstate()
        child = os.fork()
        if child == 0:
            random.setstate(numbers)  # Python seeds `random` again in a fork
            os.close(reads)
            signal.alarm(CHILD_SECONDS)
            self._says = writes
            sys.settrace(None)
            self.raised = kind
            raise kind(where)
        os.close(writes)
        self.num_forked += 1
        with os.fdopen(reads) as said:
            words = said.read()
        os.waitpid(child, 0)
        if words != "as it was":
            self.failed.append(f"{where}: {words or 'the process ended'}")
        if LOG:
            print(where, words[:200], flush=True)

    def leave(self, words: str) -> None:
        """Ends a fork."""
        os.write(self._says, words.encode())
        os._exit(0)


def _is_asked_by_torch(frame: Any) -> bool:
    """Whether torch asks from C++ where a tensor lies: what is raised there aborts any process, so interrupts wait."""
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and frame.f_locals.get("func") is torch.ops.prim.device.default:
            return True
        frame = frame.f_back
    return False


def _begins_or_ends_to_handle(frame: Any) -> bool:
    """Whether an exception is about to be noted as the one that is handled, or as handled.

    A tracer can raise there; what is undone then was not yet done, or is not undone any more, and the thread handles
    the first one for good: with its frames it holds all their tensors. Python lets no signal in there.
    """
    return frame.f_code.co_code[frame.f_lasti] in (dis.opmap["PUSH_EXC_INFO"], dis.opmap["POP_EXCEPT"])


@pytest.fixture(scope="module")
def reference() -> tuple[Any, list[list[Any]], dict[str, Counter[Line]]]:
    """A plan, the states of the next three plain steps, and how often each line of a function runs."""
    plain = Training()
    states = [plain.state()]
    for _ in range(3):
        plain.step()
        states.append(plain.state())
    warm = Training()
    plan = recoup.plan(warm.model, warm.batch, loss=Training.loss, optimizer=warm.optimizer, budget="75%")
    return plan, states, {}


def count_lines(name: str, plan: Any) -> Counter[Line]:
    call = calls(Training(), plan)[name]
    _taken_off(call())  # measurements of ops are kept: the lines are counted as they are the second time
    with Lines() as lines:
        result = call()
    _taken_off(result)
    return lines.counts


def _taken_off(result: Any) -> None:
    if isinstance(result, recoup.Fit):
        result.applied.remove()


def check(training: Training, states: list[list[Any]], process: list[Any], num_threads: int, where: str) -> None:
    """Asserts that nothing was left and that the next three steps are plain's.

    Args:
        process, num_threads: as they were before the call; a fork has one thread, whatever its parent has.
    """
    assert fakes_left() == 0, f"fake tensors are left, {where}"
    now = process_state()
    assert same(now, process), f"the process is not as it was, {where}: {differing(now, process)}"
    assert threading.active_count() <= num_threads, f"a thread is left, {where}"
    for name, (now, before) in enumerate(zip(training.state(), states[0], strict=True)):
        assert same(now, before), f"item {name} is not as it was, {where}: {differing(now, before)}"
    for i, expected in enumerate(states[1:]):
        training.step()
        assert same(training.state(), expected), f"step {i + 1} is not plain's, {where}"


def lines_of(name: str, reference: Any) -> Counter[Line]:
    plan, _, counted = reference
    if name not in counted:
        counted[name] = count_lines(name, plan)
    return counted[name]


def run_points(name: str, reference: Any, targets: dict[Line, tuple[int, type[BaseException]]]) -> int:
    """Raises at each target of one call; returns how many were reached."""
    plan, states, _ = reference
    training = Training()
    call = calls(training, plan)[name]
    lines, ended_by, result = Lines(targets), "nothing", None
    gc.collect()
    gc.freeze()  # what is there now is not looked through in each fork
    process = process_state()
    try:
        with warnings.catch_warnings(), lines:
            result = call()
    except BaseException as error:
        if lines.raised is None:
            raise
        ended_by = type(error).__name__
    _taken_off(result)
    if lines.raised is None:
        gc.unfreeze()
        assert not lines.failed, f"{len(lines.failed)} of {lines.num_forked}: " + "\n".join(lines.failed)
        return lines.num_forked
    try:  # a fork
        if lines.raised is Injected:
            assert ended_by == "Injected", f"Ctrl-C did not end it but {ended_by} did"
        check(training, states, process, 1, "")
    except BaseException as error:
        lines.leave(f"{type(error).__name__}: {error}"[:2000])
    lines.leave("as it was")
    raise AssertionError


def sampled(lines: list[Line], num: int, seed: int) -> list[Line]:
    in_order = sorted(lines, key=lambda line: (line[0].co_filename, line[1], line[0].co_name))
    return random.Random(seed).sample(in_order, min(num, len(in_order)))


@pytest.mark.slow
def test_an_exception_where_things_are_put_back_leaves_nothing(reference: Any) -> None:
    counts = lines_of("verify", reference)
    lines = [line for line in counts if line[0].co_name in CRITICAL]
    # A profiler that was on already, or is to be left: what measured next failed.
    profiler = [line for line in lines if line[0].co_name in ("start", "measure_peak")]
    targets = [*sampled(profiler, 3, seed=4), *sampled(lines, 3, seed=1)]
    points = {line: (counts[line], Injected) for line in targets}
    run_points("verify", reference, points | {max(profiler, key=lambda line: line[1]): (1, Injected)})


@pytest.mark.slow
@pytest.mark.timeout(0 if "RECOUP_POINTS" in os.environ else 300)
@pytest.mark.parametrize("name", ["fit", "plan", "profile", "verify"])
def test_an_exception_at_many_lines_leaves_nothing(name: str, reference: Any) -> None:
    counts, rng = lines_of(name, reference), random.Random(SEED)
    lines = sampled(list(counts), NUM_POINTS, seed=SEED)
    kinds = itertools.cycle((Injected, InjectedError))
    points = {line: (rng.randint(1, counts[line]), kind) for line, kind in zip(lines, kinds, strict=False)}
    num_reached = run_points(name, reference, points)
    assert num_reached > 0.9 * len(points)
    print(f"{name}: {num_reached} points")


@many
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit", "verify"])
def test_an_interrupt_by_signal_leaves_nothing(name: str, reference: Any) -> None:
    plan, states, _ = reference
    warm = Training()
    began = time.perf_counter()
    _taken_off(calls(warm, plan)[name]())
    seconds = time.perf_counter() - began
    for i in range(NUM_SIGNALS):
        training = Training()
        call = calls(training, plan)[name]
        process, num_threads = process_state(), threading.active_count()
        timer = threading.Timer(seconds * (i + 0.5) / NUM_SIGNALS, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            _taken_off(call())
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt as error:
            error.__traceback__ = None
        timer.join()
        check(
            training, states, process, num_threads, f"after an interrupt at {i + 0.5} of {NUM_SIGNALS} parts of {name}"
        )
