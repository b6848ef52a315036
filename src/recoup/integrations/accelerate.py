"""Accelerate: plan before `accelerator.prepare` or after it.

fit = recoup.integrations.accelerate.fit(accelerator, model, batch, budget="8GiB")
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

import contextlib
from typing import Any

from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from torch import nn

from recoup import api
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.step import Loss
from recoup.errors import ConflictError
from recoup.integrations.distributed import check_same_plan, unwrap
from recoup.integrations.precision import forward_under


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    timed: bool = False,
) -> api.Fit:
    """Plans in the accelerator's precision, changes the model in place and proves it.

    With `gradient_accumulation_steps` the gradients are there when forward begins, and are planned for.

    Args:
        model: before `prepare`, or what `prepare` returned for one process or DDP. An FSDP model is planned before
            `prepare`: afterwards a rank holds only its part.
        optimizer: before `prepare`, or its class.
        batch: a batch on the model's device.
        accelerator: the one that trains: its precision, plugins and `gradient_accumulation_steps` are planned for.
        budget: as for `recoup.fit`.
        loss: as for `recoup.fit`.
        timed: as for `recoup.fit`.

    Raises:
        ConflictError: if the accelerator turns on its own activation checkpointing, or the model is sharded already.
    """
    plugin = accelerator.state.fsdp_plugin if hasattr(accelerator.state, "fsdp_plugin") else None
    if plugin is not None and getattr(plugin, "activation_checkpointing", False):
        raise ConflictError(
            "The FSDP plugin has activation_checkpointing=True, and a recoup plan decides which modules are "
            "recomputed. Leave it out of the plugin (fsdp_activation_checkpointing: false)."
        )
    if plugin is not None and type(model).__name__.startswith(("FSDP", "FullySharded")):
        raise ConflictError(
            "This model is sharded already: a rank holds only its part, so a step cannot be planned from it. Call "
            "recoup.integrations.accelerate.fit before accelerator.prepare."
        )
    core = unwrap(model)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    # `native_amp` is off where accelerate runs in full precision whatever was asked for: fp16 on a CPU.
    in_precision = forward_under(core, accelerator.autocast, convert_to_fp32)
    with in_precision if accelerator.native_amp else contextlib.nullcontext():
        accumulate = accelerator.gradient_accumulation_steps
        found = api.fit(core, batch, budget=budget, loss=loss, accumulate=accumulate, optimizer=optimizer, timed=timed)
    check_same_plan(found.plan)
    return found
