"""A plan as transformers' setting and as an FSDP policy."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

import recoup
from recoup.errors import UsageError
from recoup.export.fsdp import export_fsdp
from recoup.export.left_out import Export
from recoup.export.plain_torch import export_torch
from recoup.export.transformers_setting import every_n_layers, export_transformers
from recoup.ir.decision import Recompute
from tests.export.test_plain_torch import plan_of
from tests.ir.test_schema import make_plan
from tests.models import make, plain_step, same, step


def run(export: Export) -> Any:
    namespace = types.ModuleType("exported")
    exec(compile(export.code, "exported.py", "exec"), namespace.__dict__)
    return namespace


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("numbers", "n"), [((0, 2), 2), ((0, 1, 2), 1)])
def test_every_nth_layer_is_a_setting_of_transformers(kind: str, numbers: tuple[int, ...], n: int) -> None:
    stack = "model.layers" if kind == "llama" else "transformer.h"
    plan = plan_of([(f"{stack}.{i}",) for i in numbers])
    assert every_n_layers(plan) == n
    model, batch, loss = make(kind)
    expected = plain_step(model, batch, loss)
    run(export_transformers(plan)).apply_plan(model)
    assert same(step(model, batch, loss), expected)


def test_transformers_choice_is_checked_against_the_plan() -> None:
    model, _, _ = make("llama")  # three layers; the plan was made for six
    with pytest.raises(ValueError, match="the plan has 3 layers up to"):
        run(export_transformers(plan_of([("model.layers.0",), ("model.layers.2",), ("model.layers.4",)]))).apply_plan(
            model
        )


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([("model.layers.1",), ("model.layers.2",)], "recomputes layers 1, 2"),
        ([("model.layers.0",), ("model.layers.1",), ("model.layers.3",)], "recomputes layers 0, 1, 3"),
        ([("model.layers.0.mlp",), ("model.layers.1.mlp",)], "has the region `model.layers.0.mlp`"),
        ([("model.layers.0", "model.layers.1")], "through `model.layers.1`"),
    ],
)
def test_what_is_no_setting_of_transformers_is_refused(regions: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export_transformers(plan_of(regions))


@pytest.mark.parametrize(("kind", "paths"), [("stack", ["layers.0", "layers.2"]), ("gpt2", ["transformer.h.1.mlp"])])
def test_the_fsdp_policy_wraps_the_plans_modules(kind: str, paths: list[str]) -> None:
    model, batch, loss = make(kind)
    expected = plain_step(model, batch, loss)
    keys = list(model.state_dict())
    module = run(export_fsdp(plan_of([(p,) for p in paths])))
    module.apply_plan(model)
    wrapped = [name for name, m in model.named_modules() if isinstance(m, CheckpointWrapper)]
    assert wrapped == paths
    assert list(model.state_dict()) == keys
    assert same(step(model, batch, loss), expected)


def test_the_fsdp_policy_sees_through_wrappers() -> None:
    module = run(export_fsdp(plan_of([("layers.0",)])))
    names = ["_fsdp_wrapped_module.layers.0", "layers.0._fsdp_wrapped_module", "_orig_mod.layers.0"]
    assert [module.plain_name(name) for name in names] == ["layers.0"] * 3
    with pytest.raises(ValueError, match=r"no module \['layers.0'\]"):
        module.make_policy(torch.nn.Linear(2, 2))


def test_spans_in_a_policy_are_said() -> None:
    assert "1 regions go over several calls" in export_fsdp(plan_of([("layers.0", "layers.1")])).left_out[0]
    decisions = (Recompute(path="a", buffers=("a.count",)),)
    assert "changes these buffers again: a.count" in export_fsdp(make_plan(decisions=decisions)).left_out[0]


def test_statistics_that_a_second_run_counts_again_are_said() -> None:
    model, batch, loss = make("batch-norm")
    plan = recoup.plan(model, batch, loss=loss, budget="60%", actions=("recompute",), device="cpu-generic")
    paths = {path for region in plan.regions for path in region.paths}
    norms = [name for i in range(4) if {(name := f"layers.{i}.norm"), f"layers.{i}"} & paths]
    assert norms and {name.rpartition(".")[0] for region in plan.regions for name in region.buffers} == set(norms)
    assert f"changes these buffers again: {norms[0]}.num_batches_tracked, " in export_fsdp(plan).left_out[-1]
    layers = tuple(Recompute(path=f"layers.{i}", buffers=(f"layers.{i}.norm.running_mean",)) for i in range(6))
    said = export_transformers(make_plan(decisions=layers)).left_out
    assert said[0].endswith("layers.3.norm.running_mean, ...")
    assert not any("buffers" in sentence for sentence in export_torch(plan).left_out)  # it leaves them alone


@pytest.fixture
def one_rank() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_fsdp_policy_under_fully_shard(one_rank: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, batch, loss = make("stack")
    twin, _, _ = make("stack")
    run(export_fsdp(plan_of([("layers.0",), ("layers.2",)]))).apply_plan(model)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    found, expected = step(model, batch, loss), step(twin, batch, loss)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.full_tensor() if isinstance(a, DTensor) else a, b)
