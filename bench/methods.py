"""What people do by hand or with other tools to fit a step into less memory: one small function a method.

A method is prepared once for a model and gives back a function that returns a context manager: the model runs the
method's way inside it. `NotImplementedError` says why a method has nothing to offer for a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from bench.auto_sac import auto_sac
from recoup.ir.decision import Rederive
from recoup.runtime.apply import apply_decisions
from recoup.selective.layers import PRESETS

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
_HEAVY = {*_MATMULS, torch.ops.aten.convolution.default} | {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
}
Forward = Callable[..., Any]
Enter = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What a method is given: a model, one batch, the loss, and the paths of the layers one would checkpoint."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Any] | None
    layers: list[str]


@contextlib.contextmanager
def wrapped(model: nn.Module, paths: list[str], wrap: Callable[[Forward], Forward], every: int = 1) -> Iterator[None]:
    """Replaces forwards for the duration, of every k-th call to the modules at `paths` in a step.

    The key-value cache of a transformers model is off, as everybody does who checkpoints its layers.
    """
    calls = 0

    def restart(*_: Any) -> None:
        nonlocal calls
        calls = 0

    def choose(forward: Forward) -> Forward:
        changed = wrap(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return (changed if (calls - 1) % every == 0 else forward)(*args, **kwargs)

        return run if every > 1 else changed

    modules = [model.get_submodule(path) for path in paths]
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    handle = model.register_forward_pre_hook(restart)
    if cached is not None:
        config.use_cache = False
    for module in modules:
        # Put back below: patching the instance is how torch users wrap a layer without changing its path.
        module.forward = choose(module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward
        handle.remove()
        if cached is not None:
            config.use_cache = cached


def _checkpointed(forward: Forward) -> Forward:
    return functools.partial(checkpoint, forward, use_reentrant=False)


def plain(subject: Subject) -> Enter:
    """The step as it is."""
    return contextlib.nullcontext


def every(subject: Subject, k: int) -> Enter:
    """Every k-th layer recomputed by torch.utils.checkpoint."""
    return lambda: wrapped(subject.model, subject.layers, _checkpointed, k)


def sqrt_segments(subject: Subject) -> Enter:
    """checkpoint_sequential with sqrt(n) segments of layers that form a chain."""
    paths = subject.layers
    parent = subject.model.get_submodule(paths[0].rpartition(".")[0])
    chain = list(parent.children())
    if not isinstance(parent, nn.Sequential) or len(chain) != len(paths):
        raise NotImplementedError("its layers are not one nn.Sequential: a segment cannot be made without its code")
    segments = round(math.sqrt(len(chain)))

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        # As above; a lambda has no annotations to check against the method.
        parent.forward = lambda x: checkpoint_sequential(chain, segments, x, use_reentrant=False)  # type: ignore
        try:
            yield
        finally:
            del parent.forward

    return enter


def selective(subject: Subject, saved: set[Any], *, second_matmul_runs_again: bool = False) -> Enter:
    """Every layer checkpointed, the results of some ops kept (op-level SAC).

    Args:
        second_matmul_runs_again: of the matmuls, keep every other one only, as torchtitan does.
    """

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = op in saved
            if keep and second_matmul_runs_again and op in _MATMULS:
                counts[context.is_recompute] += 1
                keep = counts[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def wrap(forward: Forward) -> Forward:
        return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)

    return lambda: wrapped(subject.model, subject.layers, wrap)


def transformers_switch(subject: Subject) -> Enter:
    """transformers' own activation checkpointing."""
    model: Any = subject.model
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise NotImplementedError("not a transformers model")
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise NotImplementedError(f"transformers has no activation checkpointing for {type(model).__name__}")

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            try:
                yield
            finally:
                model.gradient_checkpointing_disable()

    return enter


def memory_budget(subject: Subject, share: float, backend: str = "aot_eager_decomp_partition") -> Enter:
    """torch's memory budget: every layer compiled, the partitioner keeps that share of its activations.

    `aot_eager_decomp_partition` partitions as inductor does and runs the ops as eager does: memory and FLOPs are the
    compiler's own, time is without its fused kernels. `aot_eager` does so without inductor's decompositions: bits stay
    eager's, and some peaks are lower.
    """
    import torch._dynamo
    import torch._functorch.config as config

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # one entry for each layer and mode
    compiled: dict[Forward, Forward] = {}

    def wrap(forward: Forward) -> Forward:
        if forward not in compiled:
            compiled[forward] = torch.compile(forward, backend=backend)
        return compiled[forward]

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        before = config.activation_memory_budget
        config.activation_memory_budget = share
        try:
            with wrapped(subject.model, subject.layers, wrap):
                yield
        finally:
            config.activation_memory_budget = before

    return enter


def remat(subject: Subject, *, keep_attention: bool) -> Enter:
    """Meta's torch-remat by hand: every layer recomputed, its attention kept or not."""
    import torch_remat

    attention = PRESETS["attention"](subject.model) if keep_attention else []
    below = [p for p in attention if any(p.startswith(f"{layer}.") for layer in subject.layers)]
    if keep_attention and not below:
        raise NotImplementedError("no attention in its layers")
    rng = _CpuStream()

    def layer(forward: Forward) -> Forward:
        return torch_remat.checkpoint(recompute_state_hooks=(rng,))(forward)

    def kept(forward: Forward) -> Forward:
        region = torch_remat.region(forward, "attention", recompute=False)

        def run(*args: Any, **kwargs: Any) -> Any:
            output = region(*args, **kwargs)
            tensors = [output] if isinstance(output, torch.Tensor) else [t for t in output if t is not None]
            torch_remat.recompute_needs_tensor(*tensors)
            return output

        return run

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with wrapped(subject.model, below, kept), wrapped(subject.model, subject.layers, layer):
            yield

    return enter


class _CpuStream:
    """What torch-remat asks to be told about random numbers."""

    def snapshot(self) -> torch.Tensor:
        return torch.get_rng_state()

    def restore(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def ckptplan(subject: Subject, share: float) -> Enter:
    """ckptplan's dynamic programme, for that share of the activations; it knows chains only.

    On a CPU it takes no bytes of its own, so it is given each block's saved bytes.
    """
    import ckptplan as peer

    model, paths = subject.model, subject.layers
    modules = [model.get_submodule(p) for p in paths]
    if list(model.children()) != modules or not isinstance(subject.batch, torch.Tensor):
        raise NotImplementedError("not a chain of layers from input to output, the only models ckptplan knows")
    blocks = peer.declare_blocks(model, list(zip(paths, modules)))
    profiles = peer.profile_blocks(blocks, (subject.batch,), device=subject.batch.device, num_warmup=1, num_trials=3)
    priced, x = [], subject.batch
    for profile, module in zip(profiles, modules):
        saved: dict[int, int] = {}

        def pack(t: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            if not isinstance(t, nn.Parameter):
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = module(x.detach().requires_grad_())
        priced.append(
            dataclasses.replace(
                profile,
                activation_bytes_estimate=sum(saved.values()),
                timing_only=False,
                activation_bytes_method="isolated_forward_delta",
            )
        )
        x = out.detach()
    total = sum(p.activation_bytes_estimate or 0 for p in priced)
    plan = peer.plan_checkpoints(
        tuple(priced), blocks, target_kind="activation_budget_bytes", target_value=int(share * total)
    )
    chosen = [d.block_id for d in plan.decisions if d.checkpointed]
    return lambda: wrapped(model, chosen, _checkpointed)


def rederived(subject: Subject) -> Enter:
    """recoup's rederive everywhere, without a plan."""
    return lambda: apply_decisions(subject.model, (Rederive(path=""),))


METHODS: dict[str, Callable[[Subject], Enter]] = {
    "plain": plain,
    "every layer": lambda s: every(s, 1),
    "every 2nd layer": lambda s: every(s, 2),
    "every 3rd layer": lambda s: every(s, 3),
    "sqrt segments": sqrt_segments,
    "SAC, matmuls kept": lambda s: selective(s, _MATMULS),
    "SAC, matmuls, attention, convolutions kept": lambda s: selective(s, _HEAVY),
    "SAC, torchtitan's list": lambda s: selective(s, _HEAVY, second_matmul_runs_again=True),
    "auto-SAC 0.7": lambda s: auto_sac(s.model, s.batch, s.loss, 0.7),
    "auto-SAC 0.5": lambda s: auto_sac(s.model, s.batch, s.loss, 0.5),
    "memory budget 0.5, compiled layers": lambda s: memory_budget(s, 0.5),
    "memory budget 0.1, compiled layers": lambda s: memory_budget(s, 0.1),
    "memory budget 0.5, compiled layers, no decompositions": lambda s: memory_budget(s, 0.5, "aot_eager"),
    "torch-remat": lambda s: remat(s, keep_attention=False),
    "torch-remat, attention kept": lambda s: remat(s, keep_attention=True),
    "ckptplan 0.5": lambda s: ckptplan(s, 0.5),
    "transformers' switch": transformers_switch,
    "rederive alone (recoup)": rederived,
}
