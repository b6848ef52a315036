"""The proof that a function treats each position by itself: what it lets through, and why it refuses the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerFF

from recoup.runtime.tile.module.position_wise import Proof, prove

B, S, H = 2, 7, 16
SMALL = {"hidden_size": H, "intermediate_size": 40, "num_attention_heads": 2}


def proof_of(function: Callable[[torch.Tensor], Any]) -> Proof:
    x = torch.randn(B, S, H, requires_grad=True)
    return prove(lambda given: function(given[0]), [x], (B, S))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + grad.sum(1, keepdim=True)  # whatever it likes


POSITION_WISE: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
    "llama mlp": lambda: LlamaMLP(hf.LlamaConfig(**SMALL)),
    "llama norm": lambda: LlamaRMSNorm(H),
    "gpt2 mlp": lambda: GPT2MLP(40, hf.GPT2Config(n_embd=H, n_head=2, resid_pdrop=0.0)),
    "t5 mlp": lambda: T5LayerFF(hf.T5Config(d_model=H, d_ff=32, dropout_rate=0.0)),
    "layer norm": lambda: nn.LayerNorm(H),
    "linear": lambda: nn.Linear(H, 3),
    "no bias": lambda: nn.Linear(H, 3, bias=False),
    "dropout off": lambda: nn.Sequential(nn.Linear(H, 8), nn.Dropout(0.5)).eval(),
    "softmax of features": lambda: nn.Sequential(nn.Linear(H, 5), nn.Softmax(-1)),
    "heads": lambda: lambda x: x.view(B, S, 4, 4).softmax(-1).transpose(2, 3).reshape(B, S, H),
    "in place inside": lambda: lambda x: (x * 2).relu_().add_(x),
    "halves": lambda: lambda x: F.silu(x[..., : H // 2]) * x[..., H // 2 :],
    "glu": lambda: nn.GLU(-1),
    "joined": lambda: lambda x: torch.cat([x, x.sin()], -1),
    "statistics": lambda: lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "best features": lambda: lambda x: x.topk(3, -1).values,
    "one number for all": lambda: lambda x: x * torch.tensor(2.0) + torch.arange(H),
    "positions swapped and back": lambda: lambda x: x.transpose(0, 1).exp().transpose(0, 1),
}


@pytest.mark.parametrize("name", POSITION_WISE)
def test_lets_through(name: str) -> None:
    torch.manual_seed(0)
    function = POSITION_WISE[name]()
    proof = proof_of(function)
    assert proof.reason == ""
    if isinstance(function, nn.Module):
        assert {id(p) for p in proof.leaves} == {id(p) for p in function.parameters()}
    # What it proved is so: any position alone gives the same values.
    x = torch.randn(B, S, H)
    if name != "heads":  # whose sizes are written down
        torch.testing.assert_close(function(x)[:, 3:4], function(x[:, 3:4]))


MIXES: dict[str, tuple[Callable[[], Callable[[torch.Tensor], Any]], str]] = {
    "cumsum": (lambda: lambda x: x.cumsum(1), "along the positions"),
    "softmax over positions": (lambda: nn.Softmax(1), "along the positions"),
    "mean over positions": (lambda: lambda x: x * x.mean(1, keepdim=True), "along the positions"),
    "sum of all": (lambda: lambda x: x / x.sum(), "not known to keep"),
    "norm of all": (lambda: lambda x: x / x.norm(), "all dimensions"),
    "attention": (lambda: lambda x: x @ x.transpose(1, 2) @ x, "positions"),
    "gram": (lambda: lambda x: x @ (x.flatten(0, 1).t() @ x.flatten(0, 1)), "sums over positions"),
    "batch norm": (lambda: lambda x: nn.BatchNorm1d(H)(x.flatten(0, 1)).view_as(x), ""),
    "group norm": (lambda: nn.GroupNorm(1, S), "not known to keep"),
    "convolution": (lambda: lambda x: nn.Conv1d(H, H, 3, padding=1)(x.mT).mT, ""),
    "rolled": (lambda: lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), ""),
    "shifted": (lambda: lambda x: x.roll(1, 1), "not known to keep"),
    "flipped": (lambda: lambda x: x.flip(1), "along the positions"),
    "reshaped across": (lambda: lambda x: x.transpose(0, 1).reshape(B, S, H), "do not lie together"),
    "added across": (lambda: lambda x: x + x.flip(-1).transpose(0, 1).reshape(B, S, H), "do not lie together"),
    "position numbers": (lambda: lambda x: x + torch.arange(S)[:, None], "value for each position"),
    "learned positions": (lambda: lambda x: x + torch.ones(S, H).sin(), "value for each position"),
    "one position": (lambda: lambda x: x * x[:, :1], "some positions"),
    "last position": (lambda: lambda x: x[:, -1], ""),
    "dropout": (lambda: nn.Dropout(0.1), "random numbers"),
    "noise": (lambda: lambda x: x + torch.randn(H), "random numbers"),
    "input in place": (lambda: lambda x: x.detach().mul_(2), "in place"),
    "its value asked for": (lambda: lambda x: x * float(x.detach().numpy()[0, 0, 0]), "without data"),
    "no tensor": (lambda: lambda x: (x, x), "returns a tuple"),
    "constant": (lambda: lambda x: torch.ones(B, S, H), "does not depend"),
    "own backward": (lambda: Doubled.apply, "backward of its own"),
}


@pytest.mark.parametrize("name", MIXES)
def test_refuses(name: str) -> None:
    torch.manual_seed(0)
    make, why = MIXES[name]
    reason = proof_of(make()).reason
    assert reason
    assert why in reason


def test_refuses_a_tensor_with_a_graph_of_its_own() -> None:
    w = torch.ones(H, requires_grad=True) * 2
    assert "neither its argument nor a parameter" in proof_of(lambda x: x * w).reason
    leaf = torch.ones(H, requires_grad=True)
    proof = proof_of(lambda x: x * leaf)
    assert proof.reason == "" and proof.leaves == (leaf,)


def test_two_arguments_keep_positions_together() -> None:
    a, b = torch.randn(B, S, H), torch.randn(B, S, 3)
    assert prove(lambda g: g[0][..., :3] * g[1], [a, b], (B, S)).reason == ""
    square = torch.randn(4, 4, H)  # sizes alone do not tell that one is transposed
    assert prove(lambda g: g[0] + g[1].transpose(0, 1), [square, square], (4, 4)).reason != ""
