"""torch's automatic selective checkpointing with the apply step it lacks.

`torch.distributed._tools` estimates each module's memory, times and trade-off curve under fake tensors
(`MemTracker`, `RuntimeEstimator`, `SACEstimator`), and its MILP (`sac_milp`) says which modules to checkpoint and what
share of their activations to discard. Written here: a cost function for machines without CUDA (its own aborts), a
limit of time for the solver, and the policies that carry the answer out. All private to torch, seen on 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from recoup.capture.step import Objective

SOLVER_SECONDS = 20
_FLOPS_PER_MS, _BYTES_PER_MS = 5e7, 1e7
_estimates: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, int] | str] = weakref.WeakKeyDictionary()


def auto_sac(model: nn.Module, batch: Any, loss: Any, share: float) -> Callable[[], Any]:
    """Returns what applies torch's answer for `share` of its own estimate of the plain step's peak.

    Raises:
        NotImplementedError: with the reason, if torch's estimators or solver have no answer.
    """
    from torch.distributed._tools import sac_ilp

    if model not in _estimates:
        try:
            _estimates[model] = _estimate(model, batch, loss)
        except Exception as error:  # whatever torch's estimators meet is the answer, for every share
            said = " ".join(str(error).split())[:160]
            _estimates[model] = f"torch's estimators fail: {type(error).__name__} {said}".strip()
    known = _estimates[model]
    if isinstance(known, str):
        raise NotImplementedError(known)
    graph, estimator, peak_bytes = known
    solver = sac_ilp.PULP_CBC_CMD
    sac_ilp.PULP_CBC_CMD = lambda **options: solver(**{**options, "timeLimit": SOLVER_SECONDS})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen, _, found = sac_ilp.sac_milp(copy.deepcopy(graph), memory_budget=share * peak_bytes / 2**30)
            if found == -1:
                raise NotImplementedError(
                    f"torch's MILP finds nothing at {share:.0%} of its own estimate within {SOLVER_SECONDS} s"
                )
            policies = {
                name: sac_ilp.get_optimal_checkpointing_policy_per_module(estimator.sac_mod_stats[name], 1 - discarded)
                for name, discarded in chosen.items()
            }
    finally:
        sac_ilp.PULP_CBC_CMD = solver
    return lambda: _applied(model, policies)


def _estimate(model: nn.Module, batch: Any, loss: Any) -> tuple[Any, Any, int]:
    """Returns torch's module graph, its SAC estimator, and its estimate of the plain step's peak in bytes."""
    from torch.distributed._tools import ilp_utils, mem_tracker, runtime_estimator, sac_estimator

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = copy.deepcopy(model)
    for module in fake.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in list(store.items()):
                if tensor is not None:
                    other = fake_mode.from_tensor(tensor.detach())
                    store[name] = nn.Parameter(other, tensor.requires_grad) if store is module._parameters else other
    inputs = tree_map_only(torch.Tensor, fake_mode.from_tensor, batch)

    def step(backward: bool = True) -> None:
        value = Objective(loss=loss).run(fake, inputs)
        if backward:
            value.backward()

    with fake_mode, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        memory = mem_tracker.MemTracker()
        memory.track_external(fake)
        with memory:
            for turn in range(2):
                step()
                fake.zero_grad()
                if turn == 0:
                    memory.reset_mod_stats()
        times = runtime_estimator.RuntimeEstimator()("operator-level-cost-model")
        times._estimate = _cost
        with times:
            step()
        estimator = sac_estimator.SACEstimator()("operator-level-cost-model")
        estimator._estimate_runtime = _cost
        with estimator:
            step(backward=False)
        information = ilp_utils.aggregate_stats(fake, memory, times, estimator, torch.device("cpu"))
        graph = ilp_utils.parse_module_info(information)
        peak_bytes, _ = ilp_utils.get_peak_memory_runtime_baseline(graph)
    return graph, estimator, peak_bytes


def _cost(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Runs a fake op; returns its result and milliseconds by a roofline of a CPU core."""
    out = func(*args, **(kwargs or {}))
    packet = func._overloadpacket
    flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
    moved = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal moved
        moved += tensor.numel() * tensor.element_size()
        return tensor

    if not func.is_view:
        tree_map_only(torch.Tensor, count, (args, kwargs, out))
    return out, max(flops / _FLOPS_PER_MS, moved / _BYTES_PER_MS)


@contextlib.contextmanager
def _applied(model: nn.Module, policies: dict[str, list[int]]) -> Iterator[None]:
    """Checkpoints the chosen modules, each op kept or run again by its number in the module's forward."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    root = type(model).__name__

    def contexts(kept: list[int]) -> Any:
        counts = {False: 0, True: 0}

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op in OPS_TO_ALWAYS_SKIP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            number = counts[context.is_recompute]
            counts[context.is_recompute] += 1
            keep = number < len(kept) and kept[number] == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)

    modules = [
        (model.get_submodule(name.removeprefix(root).removeprefix(".")), kept) for name, kept in policies.items()
    ]
    for module, kept in modules:
        # Put back below; the instance is patched so that module paths stay those the policies name.
        module.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, module.forward, use_reentrant=False, context_fn=functools.partial(contexts, kept)
        )
    try:
        yield
    finally:
        for module, _ in modules:
            del module.forward
