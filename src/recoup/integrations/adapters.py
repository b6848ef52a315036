"""Other libraries' names for activation checkpointing, over the same engine.

- FairScale: `checkpoint_wrapper(module)`.
- Megatron-LM: `recompute(model, recompute_granularity=..., recompute_modules=[...])`.
- DeepSpeed: `configure(...)` and `checkpoint(function, *args)`.

Each makes regions by hand, without a budget. `recoup.plan` finds what fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn

from recoup.errors import UsageError
from recoup.ir.decision import Recompute
from recoup.runtime.apply import Applied, apply_decisions
from recoup.runtime.recompute.region import run_region
from recoup.runtime.recompute.region_step import Member

# Megatron's names, and what such a part is called in transformers' and torch's own models.
MEGATRON_PARTS = {
    "core_attn": r"(core_attention|core_attn)",
    "layernorm": r"(\w*layernorm|\w*layer_norm|ln_\d|ln_f|norm\d?)",
    "mlp": r"(mlp|feed_forward|ffn)",
    "moe": r"(moe|block_sparse_moe)",
    "moe_act": r"(act|act_fn|activation|activation_func)",
    "shared_experts": r"shared_experts?",
}


def checkpoint_wrapper(module: nn.Module, *, offload_to_cpu: bool = False) -> nn.Module:
    """Makes `module` a region, in place, and returns it: FairScale's name for it.

    Unlike FairScale's, nothing is wrapped: the class, `state_dict` and attributes stay. BatchNorm statistics are
    updated once.

    Raises:
        UsageError: if `offload_to_cpu` is True: inputs of regions stay on the device.
    """
    if offload_to_cpu:
        raise UsageError(
            "checkpoint_wrapper(offload_to_cpu=True): region inputs stay on the device here. Run the forward in "
            "torch.autograd.graph.save_on_cpu(): inputs of regions are saved through it."
        )
    apply_decisions(module, [Recompute(path="")])
    return module


def recompute(
    model: nn.Module,
    *,
    recompute_granularity: Literal["full", "selective"] = "selective",
    recompute_modules: Iterable[str] = ("core_attn",),
    recompute_method: Literal["uniform", "block"] = "uniform",
    recompute_num_layers: int = 1,
) -> Applied:
    """Makes regions as Megatron-LM's arguments of the same names do; returns the handle that undoes it.

    Args:
        model: the model.
        recompute_granularity: "full": whole layers; "selective": parts of every layer.
        recompute_modules: for "selective": Megatron's names (`MEGATRON_PARTS`) or the last part of a module's path.
        recompute_method: for "full": "uniform": regions of `recompute_num_layers` layers each; "block": the first
            `recompute_num_layers` layers, a region each. Layers are the elements of the longest module list.

    Raises:
        UsageError: if no module of the model has such a name, or a number is out of range.
    """
    if recompute_num_layers < 1:
        raise UsageError(f"recompute_num_layers must be at least 1; got {recompute_num_layers}.")
    layers = _layers(model)
    if recompute_granularity == "full":
        if recompute_method == "block":
            chosen = [Recompute(path=path) for path in layers[:recompute_num_layers]]
        else:
            groups = [layers[i : i + recompute_num_layers] for i in range(0, len(layers), recompute_num_layers)]
            chosen = [Recompute(path=g[0], span=tuple(g[1:])) for g in groups]
        return apply_decisions(model, chosen)
    chosen = []
    for name in recompute_modules:
        pattern = re.compile(rf"(.*\.)?({MEGATRON_PARTS.get(name, re.escape(name))})$")
        prefixes = tuple(f"{path}." for path in layers)
        found = [p for p, _ in model.named_modules() if p.startswith(prefixes) and pattern.fullmatch(p)]
        if not found:
            parts = sorted({p.removeprefix(prefixes[0]) for p, _ in model.named_modules() if p.startswith(prefixes[0])})
            raise UsageError(
                f"recompute_modules: no module of {type(model).__name__}'s layers is called {name!r}. Its layers "
                f"have {', '.join(parts[:12])}."
            )
        chosen += [Recompute(path=path) for path in found]
    return apply_decisions(model, chosen)


def _layers(model: nn.Module) -> list[str]:
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    if not lists:
        raise UsageError(f"{type(model).__name__} has no list of layers. Name modules to recoup.apply instead.")
    path, longest = max(lists, key=lambda item: len(item[1]))  # type: ignore[arg-type]
    return [f"{path}.{i}" if path else str(i) for i in range(len(longest))]  # type: ignore[arg-type]


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accepts the arguments of `deepspeed.checkpointing.configure`; refuses those that cannot be honoured.

    `partition_activations` and `checkpoint_in_cpu` change where inputs of regions are kept, which is not supported. The
    others (`mpu_`, `deepspeed_config`, `contiguous_checkpointing`, `num_checkpoints`, `synchronize`, `profile`) tune
    DeepSpeed's own buffers and are ignored. Nothing has to be initialised.

    Raises:
        UsageError: if `partition_activations` or `checkpoint_in_cpu` is set.
    """
    for name, value in (("partition_activations", partition_activations), ("checkpoint_in_cpu", checkpoint_in_cpu)):
        if value:
            instead = (
                "run forward in torch.autograd.graph.save_on_cpu(), which region inputs are saved through"
                if name == "checkpoint_in_cpu"
                else "shard the sequence itself (tensor or sequence parallelism), so that a rank's inputs are its part"
            )
            raise UsageError(f"configure({name}=True): region inputs stay whole and on the device here; {instead}.")


class _Function(nn.Module):
    """A function as a module without parameters, for a region to belong to."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)` run as a region; replaces `deepspeed.checkpointing.checkpoint` in a model.

    Unlike with DeepSpeed, inputs need not require a gradient, and keyword arguments are accepted. If `function` is a
    module, its replay starts from the buffers and attributes of the forward.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    module = function if isinstance(function, nn.Module) else _Function()
    member = Member(
        path=getattr(function, "__qualname__", type(function).__name__),
        module=lambda: module,
        buffers=(),
        derives=False,
        derives_by_default=False,
    )
    return run_region(member, function, args, kwargs)
