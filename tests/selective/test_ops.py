"""Operator policies: what they keep, packets as well as overloads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from recoup.selective.ops import OP_POLICIES, KeepOps, checkpoint_ops
from tests.models import Stack, make, same, step

aten = torch.ops.aten


class _Counter(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] = self.count.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def _addmms(policy: Any) -> int:
    model, batch, _ = make("stack")
    if policy is not None:
        checkpoint_ops(model, policy, paths=[f"layers.{i}" for i in range(4)])
    with _Counter() as counter:
        model(batch).backward()
    return counter.count["aten.addmm.default"]


def test_kept_matmuls_do_not_run_twice() -> None:
    assert _addmms(None) == 9
    # The last matmul of a block is never run again: nothing saved comes after it.
    everything = _addmms(lambda context, op, *a, **k: CheckpointPolicy.PREFER_RECOMPUTE)
    assert everything > 9
    assert _addmms("save-matmuls") == 9
    assert 9 <= _addmms("every-second-matmul") <= everything


@pytest.mark.parametrize("ops", [[aten.addmm], [aten.addmm.default], [aten.addmm, aten.mm.default]])
def test_a_packet_matches_as_its_overload_does(ops: list[Any]) -> None:
    assert _addmms(ops) == 9


def test_a_users_function_decides() -> None:
    seen = set()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(op)
        return CheckpointPolicy.MUST_SAVE if op is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    assert _addmms(policy) == 9
    assert aten.gelu.default in seen
    assert _addmms(lambda context, op, *a, **k: op is aten.addmm.default) == 9


def test_policies_are_removed_and_copied_with_the_model() -> None:
    model, batch, _ = make("stack")
    plain = step(copy.deepcopy(model), batch)
    applied = checkpoint_ops(model, KeepOps([aten.addmm]), paths=["layers.1"])
    twin = copy.deepcopy(model)
    assert same(plain, step(twin, batch)) and same(plain, step(model, batch))
    applied.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_named_policies_are_not_empty() -> None:
    assert all(policy.ops for policy in OP_POLICIES.values())


def test_batch_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="running statistics"):
        checkpoint_ops(Stack(batch_norm=True), "save-matmuls", paths=["layers.0"])
