"""transformers' Trainer and trainers built on it: `fit` before training, and a callback that measures a step.

fit = recoup.integrations.transformers.fit(model, args, train_dataset, budget="8GiB")
Trainer(model=model, args=args, train_dataset=train_dataset, callbacks=[RecoupCallback(fit.plan)]).train()

A trainer with a loss of its own, TRL's for example, is planned by `fit_trainer(trainer, budget="8GiB")`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from recoup import api
from recoup._pytree import map_tensors
from recoup.errors import ConflictError, UsageError
from recoup.integrations.distributed import check_same_plan, unwrap
from recoup.integrations.meter import StepMeter
from recoup.integrations.precision import autocast_forward
from recoup.integrations.sampling import columns_for, columns_of, sample_batch, without_adapters
from recoup.ir.plan import Plan
from recoup.runtime.apply import find_patches
from recoup.units import format_bytes, parse_bytes

_OTHER_CHECKPOINTING = (
    "gradient_checkpointing",
    "activation_checkpointing",
    "activation_offloading",
)  # the last: TRL's
_ABSENT: Any = object()


def fit(
    model: nn.Module,
    args: TrainingArguments,
    train_dataset: Iterable[Any],
    *,
    budget: int | str,
    data_collator: Callable[[list[Any]], Any] | None = None,
    actions: Sequence[str] | None = None,
    timed: bool = False,
) -> api.Fit:
    """Plans for the steps that a `Trainer` with these arguments will run, changes the model in place and verifies it.

    The batch is the `per_device_train_batch_size` longest of the first 1000 examples, collated, without the columns
    that the `Trainer` drops. If they are all of one length, a shorter example takes the place of one, so that there is
    padding, where the collator pads it to that length. Precision, optimizer and its options, label smoothing and noise
    on embeddings (NEFTune) are those of `args`. With gradient accumulation the gradients exist during forward, so their
    bytes are subtracted from the budget. A loss of the Trainer's own, also one given as `compute_loss_func`, is not in
    `args`: `fit_trainer` plans it.

    Args:
        model: the model, on its device.
        args: the arguments that the `Trainer` will get.
        train_dataset: the training data, of which the first 1000 examples are read.
        data_collator: the `Trainer`'s; None: the default one.
        budget: as for `recoup.fit`.
        actions: as for `recoup.fit`.
        timed: as for `recoup.fit`.

    Raises:
        ConflictError: if `args` turn on another activation checkpointing. Also the errors of `recoup.fit`.
    """
    refuse_arguments(args)
    held = 0
    target = budget
    if args.gradient_accumulation_steps > 1:
        if isinstance(budget, str) and (budget.strip().endswith("%") or budget.strip().lower() == "auto"):
            raise UsageError(f"With gradient accumulation the budget must be in bytes ('8GiB'); got {budget!r}.")
        held = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        target = parse_bytes(budget) - held
        if target <= 0:
            raise UsageError(f"The budget is below the {format_bytes(held)} of gradients that accumulate.")
    num_examples = args.per_device_train_batch_size
    batch = sample_batch(train_dataset, num_examples, data_collator, columns=columns_for(model, args))
    batch = _with_num_items(model, batch)
    optimizer = _optimizer(model, args)
    autocast = autocast_forward(model, _autocast_dtype(model, args), finish=convert_to_fp32)
    with _trainers_cache(model, args), _trainers_noise(model, args), autocast:
        step = _trainers_step(model, args, batch)
        found: api.Fit = api.fit(model, **step, budget=target, optimizer=optimizer, actions=actions, timed=timed)
    if not held:
        return found
    note = f"planned for {format_bytes(held)} less than the budget: gradients accumulate over several batches"
    plan = dataclasses.replace(
        found.plan, budget_bytes=parse_bytes(budget), budget_text=str(budget), notes=(*found.plan.notes, note)
    )
    found.applied.watch(plan)
    return dataclasses.replace(found, plan=plan)


def fit_trainer(
    trainer: Trainer,
    *,
    budget: int | str,
    batch: Mapping[str, Any] | None = None,
    actions: Sequence[str] | None = None,
    timed: bool = False,
) -> api.Fit:
    """Plans for the steps of a trainer with its own loss (TRL's), changes its model in place and verifies it.

    Call it between creating the trainer and `trainer.train()`. The step is the trainer's `compute_loss`; its counters
    and logs (metrics, tokens seen) are restored.

    Args:
        trainer: a `Trainer` or a subclass.
        batch: the largest inputs that `compute_loss` will get; None: the `per_device_train_batch_size` longest of the
            first 1000 examples, collated as by `fit`, without the columns that this trainer drops. Required for a
            trainer that makes its inputs during training (GRPO generates completions).
        budget: as for `recoup.fit`.
        actions: as for `recoup.fit`.
        timed: as for `recoup.fit`.

    Raises:
        ConflictError: if the trainer's arguments turn on another activation checkpointing or offloading.
        UsageError: if there is no batch to plan for. Also the errors of `recoup.fit`.
    """
    args = trainer.args
    model = unwrap(trainer.model)  # type: ignore[arg-type]
    refuse_arguments(args)
    if batch is None:
        dataset: Any = trainer.train_dataset
        if dataset is None:
            raise UsageError("The trainer has no train_dataset: give batch=..., the inputs of its compute_loss.")
        num_examples = args.per_device_train_batch_size
        batch = sample_batch(dataset, num_examples, trainer.data_collator, columns=columns_of(trainer))
    if not isinstance(batch, Mapping) or not any(isinstance(value, torch.Tensor) for value in batch.values()):
        raise UsageError(
            f"{type(trainer).__name__}'s collator returns a {type(batch).__name__} without tensors: it makes its "
            "inputs while it trains. Give batch=..., the largest that its compute_loss will get."
        )
    inputs: Any = map_tensors(lambda tensor: tensor.to(args.device), dict(batch))
    count = _num_items(inputs) if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None else None

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, count = batch
        with trainer.compute_loss_context_manager():
            loss: Any = trainer.compute_loss(model, dict(inputs), num_items_in_batch=count)
        return loss  # type: ignore[no-any-return]

    optimizer = _trainers_optimizer(trainer)
    model.train()
    autocast = autocast_forward(model, _autocast_dtype(model, args), finish=convert_to_fp32)
    accumulates = _attribute(trainer, "current_gradient_accumulation_steps", args.gradient_accumulation_steps)
    with _trainers_cache(model, args), _trainers_noise(model, args), _in_training(model), autocast, accumulates:
        return api.fit(
            model,
            (inputs, count),
            step=step,
            budget=budget,
            accumulate=args.gradient_accumulation_steps,
            optimizer=optimizer,
            actions=actions,
            timed=timed,
        )


@contextlib.contextmanager
def _trainers_cache(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Sets the model's `use_cache` inside of the block as a Trainer with these arguments does.

    A key-value cache costs more than its own bytes: under autocast its concatenation casts keys and values.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "use_cache"):
        yield
        return
    with _attribute(config, "use_cache", args.use_cache):
        yield


@contextlib.contextmanager
def _trainers_noise(model: nn.Module, args: TrainingArguments) -> Iterator[None]:
    """Adds noise to the embeddings inside of the block if a Trainer with these arguments does while it trains."""
    if args.neftune_noise_alpha is None:
        yield
        return
    handle = activate_neftune(model, args.neftune_noise_alpha)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        deactivate_neftune(model, handle)  # type: ignore[no-untyped-call]


def _optimizer(model: nn.Module, args: TrainingArguments) -> Any:
    """Returns the optimizer that a Trainer with these arguments makes, by the Trainer's own code."""
    trainer = object.__new__(Trainer)  # to initialise it would move the model and set up processes
    for name, value in {"model": model, "args": args, "optimizer": None, "optimizer_cls_and_kwargs": None}.items():
        setattr(trainer, name, value)
    return _made_by(trainer)


def _trainers_optimizer(trainer: Trainer) -> Any:
    """Returns the trainer's optimizer, or one as it will make when training begins; the trainer stays without it."""
    if trainer.optimizer is not None:
        return trainer.optimizer
    own = trainer.optimizer_cls_and_kwargs
    copied = None if own is None else (own[0], dict(own[1]))  # it takes some of them out
    with _attribute(trainer, "optimizer", None), _attribute(trainer, "optimizer_cls_and_kwargs", copied):
        return _made_by(trainer)


def _made_by(trainer: Trainer) -> Any:
    made: Any = trainer.create_optimizer()
    return trainer.optimizer if made is None else made  # a subclass's own need not return it


def _trainers_step(model: nn.Module, args: TrainingArguments, batch: Any) -> dict[str, Any]:
    """Returns the step of a Trainer with these arguments, as `recoup.fit` takes it.

    With label smoothing the Trainer keeps the labels from the model, and computes the loss of its logits.
    """
    config = getattr(model, "config", None)
    smooths = args.label_smoothing_factor and getattr(config, "problem_type", None) != "multi_label_classification"
    if not smooths or not isinstance(batch, Mapping) or "labels" not in batch:
        return {"batch": batch}
    smoother = LabelSmoother(epsilon=args.label_smoothing_factor)
    shifts = type(without_adapters(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def loss(output: Any, targets: Any) -> torch.Tensor:
        labels, count = targets
        found: Any = smoother(output, labels, shift_labels=shifts, num_items_in_batch=count)
        return found  # type: ignore[no-any-return]

    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return {"inputs": inputs, "targets": (batch["labels"], batch.get("num_items_in_batch")), "loss": loss}


@contextlib.contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Sets all modules to training mode inside of the block, and each one's own mode at its end."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute inside of the block; deletes it at the end if it did not exist before."""
    before = getattr(owner, name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _with_num_items(model: nn.Module, batch: Any) -> Any:
    """Returns the batch with `num_items_in_batch`, which a Trainer passes to models that scale their loss by it."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is None:
        parameters = inspect.signature(model.forward).parameters.values()
        accepts = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    count = _num_items(batch) if accepts else None
    return batch if count is None else {**batch, "num_items_in_batch": count / 1}


def _num_items(batch: Any) -> torch.Tensor | None:
    """Returns the number of labels that are not ignored; None if there are no labels."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels.ne(-100).sum() if isinstance(labels, torch.Tensor) else None


def _autocast_dtype(model: nn.Module, args: TrainingArguments) -> torch.dtype | None:
    """Returns the autocast dtype of a Trainer's forward; on a CPU accelerate runs fp16 in full precision."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 and next(model.parameters()).device.type != "cpu" else None


def refuse_arguments(args: TrainingArguments) -> None:
    """Raises ConflictError if training arguments turn on another activation checkpointing, or replace forwards."""
    fsdp = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    found = [name for name in _OTHER_CHECKPOINTING if getattr(args, name, False)]
    found += [f"fsdp_config[{name!r}]" for name in ("activation_checkpointing",) if fsdp.get(name)]
    if found:
        raise ConflictError(
            f"TrainingArguments have {' and '.join(found)} on, and a recoup plan decides which modules are recomputed. "
            "Leave it out of the arguments, or train without a plan."
        )
    if getattr(args, "use_liger_kernel", False):
        raise ConflictError(
            "TrainingArguments have use_liger_kernel on: the Trainer replaces forwards when training begins, which are "
            "not those that were planned. Leave it out of the arguments, and call "
            "transformers.integrations.liger.apply_liger_kernel(model, args.liger_kernel_config) before planning."
        )


class RecoupCallback(TrainerCallback):
    """Measures one optimizer step, compares it with the budget and reports; refuses conflicting arguments.

    Attributes:
        meter: measurement of the step. On a CPU it does not include the batch's bytes: the Trainer loads the batch
            before the step begins.
    """

    def __init__(self, plan: Plan | None = None, *, measured_step: int = 2) -> None:
        """Takes the plan in place, whose budget is compared, and the optimizer step to measure, counted from 1."""
        self.plan = plan
        self.measured_step = measured_step
        self.meter = StepMeter()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuses arguments that turn on another activation checkpointing."""
        refuse_arguments(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks that the plan is in place, and the same on every rank."""
        refuse_arguments(args)
        model = unwrap(kwargs["model"])
        if self.plan is None:
            return
        check_same_plan(self.plan)
        if self.plan.decisions and not find_patches(model):
            warnings.warn(
                "RecoupCallback was given a plan, but none is in place on the model: call recoup.apply(model, plan) "
                "before the Trainer is made.",
                stacklevel=2,
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts measuring at the chosen step."""
        if self.meter.peak_bytes is None and state.global_step + 1 >= self.measured_step:
            self.meter.start(kwargs["model"], kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops measuring; the plan in place itself warns of a step over its budget."""
        if self.meter.is_running:
            self.meter.stop()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops a measurement that is still running."""
        if self.meter.is_running:
            self.meter.stop()

    def report(self) -> str:
        """Returns one line on the measured step."""
        if self.meter.peak_bytes is None:
            return "no step was measured"
        text = f"step {self.measured_step} peaked at {format_bytes(self.meter.peak_bytes)}"
        if self.plan is not None:
            text += f", budget {format_bytes(self.plan.budget_bytes)}"
        return f"{text}; {self.meter.num_replays} regions run twice, {self.meter.num_rederived} tensors rederived"
