"""A program, and what becomes of it: exact, refused before anything was touched, or damaged."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import recoup
from recoup.evidence.memory import measure_peak, storage_bytes

DIM = 16
ROWS = 96


def square(output: Any, batch: Any) -> torch.Tensor:
    """The loss of programs that have no other."""
    return output.square().mean()


def rows(batch: int = ROWS, width: int = DIM, *, seed: int = 1) -> torch.Tensor:
    """Returns a batch of rows."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of programs that have no other."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Mlp(nn.Module):
    """Two linears and a residual."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


def stack(*blocks: Callable[[], nn.Module], times: int = 3) -> Callable[[], nn.Module]:
    """Returns what makes a chain of blocks; one kind is repeated."""
    return lambda: nn.Sequential(*[block() for block in (blocks * times if len(blocks) == 1 else blocks)])


Run = Callable[["Training"], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A training of a few steps, and the call of `fit` that it is to bear.

    Attributes:
        kind: what it is one of. name: what it does, as the table says it.
        make: builds the model. batch: makes the batch, a tuple or a dict.
        loss: of `fit` and of the training; None if the model returns it. optimizer: made before `fit`.
        step: one step of the training, if it is no forward, loss, backward and step; returns the loss.
        between: is done after `fit` and before the training. left: reads what else a step changes.
        options: of `fit`.
        predicts: the peak that is predicted of the plain step has to be the measured one.
        specialises: its own kernels change after some runs (TorchScript's), so that plain is run
            afterwards, and after some runs, to compare.
    """

    kind: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any] = lambda: (rows(),)
    loss: Callable[[Any, Any], torch.Tensor] | None = square
    optimizer: Callable[[nn.Module], Any] = sgd
    step: Run | None = None
    between: Callable[[Training, recoup.Fit | None], None] = lambda training, fitted: None
    left: Callable[[Any], Any] = lambda model: None
    options: Callable[[Training], dict[str, Any]] = lambda training: {}
    predicts: bool = False
    specialises: bool = False


class Training:
    """A program's model, batch and optimizer, from the same seeds each time."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.program = program
        self.model: Any = program.make()
        self.batch = program.batch()
        self.optimizer = program.optimizer(self.model)

    def output(self) -> Any:
        """Runs the forward."""
        return self.model(**self.batch) if isinstance(self.batch, dict) else self.model(*self.batch)

    def loss(self) -> torch.Tensor:
        """Runs forward and loss."""
        output, loss = self.output(), self.program.loss
        if loss is not None:
            return loss(output, self.batch)
        return output.loss if hasattr(output, "loss") else output

    def step(self) -> torch.Tensor:
        """Trains one step and returns its loss."""
        if self.program.step is not None:
            return self.program.step(self)
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def finish(self, steps: int = 3) -> list[Any]:
        """Trains and returns everything that is different afterwards."""
        losses = [self.step() for _ in range(steps)]
        held = [*self.model.parameters(), *self.model.buffers()]
        found: list[Any] = [losses, [t.detach().clone() for t in held], [t.grad for t in held]]
        return [*found, self.program.left(self.model), torch.rand(2), random.random(), float(np.random.rand())]

    def fit(self, budget: int | str = "60%") -> recoup.Fit:
        """Fits, at the least budget there is if the one that is asked for is below it."""
        given = {"loss": self.program.loss, "timed": False, "budget": budget, "actions": ("rederive", "recompute")}
        given |= self.program.options(self)
        for _ in range(3):
            try:
                return recoup.fit(self.model, self.batch, **given)
            except recoup.InfeasibleBudget as error:
                given["budget"] = error.minimum_bytes
        return recoup.fit(self.model, self.batch, **given)

    def plain_peak(self) -> int:
        """Returns the measured peak of forward, loss and backward, in bytes."""
        held = storage_bytes([*self.model.parameters(), *self.model.buffers(), *_tensors(self.batch)])
        peak = measure_peak(lambda: self.loss().backward(), device=torch.device("cpu"), held_bytes=held)
        self.model.zero_grad()
        return peak


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.values() if isinstance(batch, dict) else batch
    return [value for value in values if isinstance(value, torch.Tensor)]


def same(a: Any, b: Any) -> bool:
    """Returns whether two nests are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.layout != b.layout or a.shape != b.shape:
            return False
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def outcome(program: Program) -> str:
    """Returns "exact: ...", "refused: ..." or what is wrong.

    Exact: `fit` says so, is within its budget, and the training after it ends as the one without. Refused: `fit`
    raised, and the training ends as without all the same.
    """
    plain = Training(program)
    program.between(plain, None)
    expected = plain.finish()
    training = Training(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = training.fit()
        except recoup.RecoupError as error:
            said = " ".join(str(error).split())
            text = f"refused: {type(error).__name__}: {said}"
            program.between(training, None)
        else:
            if not fitted.evidence.ok:
                return f"FAILED: {'; '.join(fitted.evidence.differences) or fitted.evidence.verdict}"[:300]
            text = f"exact: {_described(fitted)}"
            program.between(training, fitted)
        found = training.finish()
        expectations = [expected, *(_specialised(program, runs) for runs in (0, 3) if program.specialises)]
        if not any(same(found, expected) for expected in expectations):
            return f"damaged, although {text}"
        if program.predicts:
            plain = Training(program)
            measured = plain.plain_peak()
            predicted = recoup.profile(plain.model, plain.batch, loss=program.loss).peak_bytes
            if abs(predicted / measured - 1) > 0.03:
                return f"mispredicted: {predicted} bytes, measured {measured}"
    return text


def _specialised(program: Program, runs: int) -> list[Any]:
    """Returns what the training leaves when its forward was run some times before, as `fit` does."""
    training = Training(program)
    stream = torch.get_rng_state()
    for _ in range(runs):
        training.loss().backward()
    training.model.zero_grad()
    torch.set_rng_state(stream)
    return training.finish()


def _described(fitted: recoup.Fit) -> str:
    evidence = fitted.evidence
    assert evidence.baseline_peak_bytes
    how = (
        "nothing to change"
        if not fitted.plan.decisions
        else f"{evidence.num_regions_replayed} regions run twice, {evidence.num_rederived} tensors rederived"
    )
    return f"{how}, {evidence.peak_bytes / evidence.baseline_peak_bytes:.0%} of the peak"


def many(kind: str, named: dict[str, Any], **rest: Any) -> list[Program]:
    """Returns programs of one kind by name: from makers, or from makers and their batches where those are not rows."""
    made = []
    for name, maker in named.items():
        make, batch = maker if isinstance(maker, tuple) else (maker, lambda: (rows(),))
        made.append(Program(kind=kind, name=name, make=make, batch=batch, **rest))
    return made
