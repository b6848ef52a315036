"""Levels read off the code that inductor writes."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

import recoup
from recoup import _torch
from recoup.compiled import division
from recoup.compiled.division import Division
from recoup.compiled.joint import JointView, view_joint_graph
from recoup.compiled.partition import keep_products
from recoup.compiled.planned import GraphCode, planned_levels
from recoup.compiled.recording import CompileOptions

_HEAD = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(["float*"], "no code")
async_compile.wait(globals())
del async_compile
"""
_FORWARD = """
def call(args):
    weight, x = args
    args.clear()
    assert_size_stride(x, (8, 16), (16, 1), "input")
    buf0 = empty_strided_cpu((8, 16), (16, 1), torch.float32)
    extern_kernels.mm(x, weight, out=buf0)
    buf1 = empty_strided_cpu((8, 16), (16, 1), torch.float32)
    cpp_fused_0(buf0, buf1)
    buf2 = buf0; del buf0  # reuse
    buf3 = empty_strided_cpu((), (), torch.float32)
    cpp_fused_0(buf1, buf2, buf3)
    return (buf3, weight, reinterpret_tensor(buf2, (16, 8), (1, 16), 0))
"""
_BACKWARD = """
def call(args):
    weight, permute, tangents_1 = args
    args.clear()
    buf0 = empty_strided_cpu((16, 16), (16, 1), torch.float32)
    extern_kernels.mm(permute, reinterpret_tensor(permute, (8, 16), (16, 1), 0), out=buf0)
    del permute
    buf1 = empty_strided_cpu((8, 16), (16, 1), torch.float32)
    cpp_fused_0(tangents_1, weight, buf1)
    return (buf0, buf1)
"""


def test_levels_of_code_that_allocates_reuses_and_deletes() -> None:
    weight, x, loss = torch.empty(16, 16), torch.empty(8, 16), torch.empty(())
    forward = GraphCode(("weight", "x"), ("loss", "weight", "permute"), (weight, x), _HEAD + _FORWARD)
    backward = GraphCode(("weight", "permute", "tangents_1"), ("dw", "dx"), (weight, x.t(), loss), _HEAD + _BACKWARD)
    found = planned_levels(forward, backward, 1)
    row, square = 8 * 16 * 4, 16 * 16 * 4
    assert max(level for level, _ in found.forward) == 2 * row + 4  # the input and the weight are not the step's
    assert found.held_bytes == row
    assert found.backward[0][0] == row + 4  # what is held, and the gradient of the loss
    assert max(level for level, _ in found.backward) == square + row + 4
    assert sorted({level for level, _ in found.backward}) == [row + 4, row + 4 + square]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_only_planned_is_planned_for_values_as_forward_lays_them_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 8, 3))  # which inductor runs channels last
    images, planned = torch.randn(4, 3, 16, 16), []
    for runs in (False, True):
        torch.compiler.reset()
        division = Division(CompileOptions(), {}, 1 << 30, above=0, runs=runs)
        (call,) = division.compile(model).values()
        with inductor_config.patch(fx_graph_cache=False):
            call(images).square().mean().backward()
        planned += division.planned.values()
    assert len(planned) == 2 and planned[0] == planned[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_keeps_to_the_plans_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak() -> int:
        torch.compiler.reset()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        division = Division(CompileOptions(), {}, 1, above=0, runs=False)
        (call,) = division.compile(nn.Sequential(*layers)).values()
        with inductor_config.patch(fx_graph_cache=False), pytest.warns(recoup.OverBudgetWarning):
            call(torch.randn(512, 32)).square().mean().backward()
        (planned,) = division.planned.values()
        return max(level for level, _ in planned.backward)

    kept = peak()
    monkeypatch.setattr(_torch, "_inductor_order", lambda _: None)
    assert kept < 0.9 * peak()


class Turned(nn.Linear):
    """A product, turned as rotary embeddings turn queries."""

    def __init__(self) -> None:
        super().__init__(32, 32, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the product plus its halves in the other order."""
        x = super().forward(input)
        a, b = x[..., :16], x[..., 16:]
        return x + torch.cat((-b, a), dim=-1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_inductor_makes_element_by_element_is_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[JointView] = []

    def viewed(*args: Any, **kwargs: Any) -> JointView:
        views.append(view_joint_graph(*args, **kwargs))
        return views[-1]

    monkeypatch.setattr(division, "view_joint_graph", viewed)
    torch.compiler.reset()
    (call,) = Division(CompileOptions(), {}, 1 << 30, above=0, runs=False).compile(Turned()).values()
    with inductor_config.patch(fx_graph_cache=False):
        call(torch.randn(64, 32)).square().mean().backward()
    (view,) = views
    found = {str(n.target): (op, s) for n, op, s in zip(view.nodes, view.step.ops, view.signatures(), strict=True)}
    scatter, signature = found["aten.slice_scatter.default"]
    assert scatter.is_fusible and scatter.reads_fusible and signature is None
    cat, signature = found["aten.cat.default"]
    assert cat.reads_fusible and not cat.is_fusible and signature is None
    product, signature = found["aten.mm.default"]
    assert not product.is_fusible and not product.reads_fusible and signature is not None


@pytest.mark.parametrize("is_later", [False, True])
def test_a_product_that_is_added_later_is_not_joined_with_the_sum(is_later: bool) -> None:
    def total(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product = x @ y
        other = x.tanh() if is_later else x
        return product + other

    module = make_fx(total, tracing_mode="fake")(*torch.randn(2, 4, 4))
    expected = module(*torch.ones(2, 4, 4))
    keep_products(module)
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert (targets[-1] is torch.ops.prims.add.default) == is_later
    assert torch.equal(module(*torch.ones(2, 4, 4)), expected)
