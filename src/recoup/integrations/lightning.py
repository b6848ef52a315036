"""Lightning: a callback that plans from the first training batch and removes the plan when fitting ends.

    trainer = lightning.Trainer(callbacks=[RecoupCallback(budget="8GiB")])

To verify the plan a few steps are run and undone. The planned step is `training_step`, whatever modules it calls, after
the module's own `on_train_batch_start`; `self.log` does nothing while it is captured. The last step's gradients are
freed when a batch begins, before forward instead of after. With gradient accumulation they exist during forward: leave
room for them. The plan is in place from the first batch on, after the strategy has set up the module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from recoup import api
from recoup.errors import UsageError
from recoup.integrations.distributed import broadcast_plan, check_same_plan
from recoup.integrations.meter import StepMeter
from recoup.ir.plan import Plan
from recoup.runtime.apply import Applied
from recoup.units import format_bytes

_LOGGERS = ("log", "log_dict", "print")


class TrainingStep(nn.Module):
    """A LightningModule's `training_step` as a module's forward: what is captured, planned and run.

    Attributes:
        module: the LightningModule; a plan's paths begin with `module.`.
        context: context around the call, as Lightning's precision plugin enters it in training.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `training_step` and returns its result."""
        with self.context():
            return type(self.module).training_step(self.module, *args, **kwargs)


class RecoupCallback(Callback):
    """Plans for a budget from the first training batch, measures a later step, and reports.

    Attributes:
        plan: the plan in place; None before the first batch.
        meter: measurement of the step `measured_step`.
    """

    def __init__(self, budget: int | str | None = None, *, plan: Plan | None = None, measured_step: int = 1) -> None:
        """Takes a budget, or a plan that this callback made earlier (`plan.save`).

        Args:
            budget: as for `recoup.plan`.
            plan: a plan whose paths begin with `module.`.
            measured_step: number of the batch to measure, counted from 0.
        """
        if (budget is None) == (plan is None):
            raise UsageError("RecoupCallback takes a budget or a plan, one of the two.")
        self.budget = budget
        self.plan = plan
        self.meter = StepMeter()
        self.measured_step = measured_step
        self._applied: Applied | None = None
        self._step: TrainingStep | None = None
        self._until_installed = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses modules whose `training_step` is more than a loss of a batch."""
        name = type(pl_module).__name__
        if not pl_module.automatic_optimization:
            raise UsageError(
                f"{name} optimizes by hand (automatic_optimization=False): its training_step runs backward and the "
                "optimizer itself, and a plan is for one that returns a loss. Have it return the loss with "
                "automatic_optimization=True; or leave out RecoupCallback, and call recoup.fit on the net that it "
                "trains, with its batch and its loss, before trainer.fit."
            )
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise UsageError(
                f"{name}.training_step takes a dataloader_iter: there is no batch to plan for before it runs. Have it "
                "take (batch, batch_idx); or leave out RecoupCallback, and call recoup.fit on the net that it trains."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Plans and applies at the first batch; starts measuring at the chosen one."""
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        accumulates = trainer.accumulate_grad_batches
        if batch_idx % accumulates == 0:
            # Lightning drops the last step's gradients between forward and backward: too late for forward's peak.
            for used in trainer.optimizers:
                used.zero_grad(set_to_none=True)
        hooks = vars(pl_module)
        own = pl_module.on_train_batch_start

        def on_train_batch_start(batch: Any, batch_idx: int) -> Any:
            self._until_installed.close()
            answer = own(batch, batch_idx)
            if answer == -1:  # the rest of the epoch is left out, this batch with it
                return answer
            if self._applied is None:
                self._install(trainer, pl_module, batch, batch_idx, optimizer)
            if batch_idx >= self.measured_step and self.meter.peak_bytes is None:
                self.meter.start(pl_module, optimizer, batch)
            return answer

        # Lightning calls the module's hook after those of callbacks, and `training_step` may need what it sets.
        before = {name: hooks[name] for name in (on_train_batch_start.__name__,) if name in hooks}
        self._until_installed.callback(hooks.update, before)
        self._until_installed.callback(hooks.pop, on_train_batch_start.__name__, None)
        hooks[on_train_batch_start.__name__] = on_train_batch_start

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Stops measuring and logs the peak."""
        if not self.meter.is_running:
            return
        self.meter.stop()
        assert self.meter.peak_bytes is not None
        if trainer.loggers:
            pl_module.log("recoup/peak_bytes", float(self.meter.peak_bytes))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Removes the plan: the module is as before."""
        self._until_installed.close()
        if self.meter.is_running:
            self.meter.stop()
        if self._applied is not None:
            self._applied.remove()
            pl_module.__dict__.pop("training_step", None)
            self._applied = self._step = None

    def report(self) -> str:
        """Returns one line on the measured step."""
        if self.meter.peak_bytes is None or self.plan is None:
            return "no step was measured"
        return (
            f"peak {format_bytes(self.meter.peak_bytes)}, budget {format_bytes(self.plan.budget_bytes)}, "
            f"{self.meter.num_replays} regions run twice, {self.meter.num_rederived} tensors rederived"
        )

    def _install(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, optimizer: Any
    ) -> None:
        takes_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
        step = TrainingStep(pl_module)
        if self.plan is None:
            assert self.budget is not None
            made = None
            if trainer.global_rank == 0:
                step.context = trainer.precision_plugin.forward_context
                args = (batch, batch_idx) if takes_index else (batch,)
                with _silent(pl_module):
                    fit = api.fit(step, args, budget=self.budget, optimizer=optimizer, timed=False)
                fit.applied.remove()
                # A plan whose evidence is not ok was warned of, and is not put in place.
                made = fit.plan if fit.evidence.ok else dataclasses.replace(fit.plan, decisions=())
                step.context = contextlib.nullcontext
            self.plan = broadcast_plan(made)
        check_same_plan(self.plan)
        self._applied = api.apply(step, self.plan)
        self._step = step
        ref = weakref.ref(step)  # weak: the module holds the wrapper, and the step holds the module

        def training_step(*args: Any, **kwargs: Any) -> Any:
            found = ref()
            assert found is not None
            return found(*args, **kwargs)

        plain = type(pl_module).training_step
        vars(training_step)["__wrapped__"] = getattr(plain, "__wrapped__", plain)  # Lightning asks what it takes
        pl_module.__dict__["training_step"] = training_step


@contextlib.contextmanager
def _silent(module: LightningModule) -> Iterator[None]:
    """Disables `self.log` and the like inside of the block, and restores random streams at its end."""
    for name in _LOGGERS:
        module.__dict__[name] = _ignore
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for name in _LOGGERS:
            module.__dict__.pop(name, None)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""
