"""Twenty models as people have them, small; each function returns (model, batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Any]


def _chain(*kinds: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(*(kind() for kind in kinds)) for _ in range(4)), nn.Linear(32, 1))


def _rows() -> torch.Tensor:
    return torch.randn(128, 32)


def _mlp() -> Made:
    return _chain(lambda: nn.Linear(32, 128), nn.Tanh, lambda: nn.Linear(128, 32)), _rows()


def _mlp_in_place() -> Made:
    return _chain(lambda: nn.Linear(32, 128), lambda: nn.ReLU(inplace=True), lambda: nn.Linear(128, 32)), _rows()


def _mlp_dropout() -> Made:
    return _chain(lambda: nn.LayerNorm(32), lambda: nn.Linear(32, 32), nn.GELU, lambda: nn.Dropout(0.2)), _rows()


def _mlp_batch_norm() -> Made:
    return _chain(lambda: nn.Linear(32, 32), lambda: nn.BatchNorm1d(32), nn.SiLU), _rows()


def _mlp_float64() -> Made:
    return _mlp()[0].double(), _rows().double()


def _mlp_bfloat16() -> Made:
    return _mlp_dropout()[0].bfloat16(), _rows().bfloat16()


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp_dropout()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x)


def _autocast() -> Made:
    return _Autocast(), _rows()


class _Residual(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def _resnet() -> Made:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), _Residual(), _Residual(), nn.MaxPool2d(2), _Residual(), nn.Flatten())
    return net, torch.randn(4, 3, 18, 18)


class _DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 4 * i + 4), nn.ReLU(), nn.Conv2d(4 * i + 4, 4, 3, padding=1))
            for i in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def _densenet() -> Made:
    return nn.Sequential(nn.Conv2d(3, 4, 3), _DenseBlock(), nn.AvgPool2d(2)), torch.randn(2, 3, 18, 18)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())

        self.down1, self.down2, self.middle = block(3, 8), block(8, 16), block(16, 16)
        self.up2, self.up1 = block(32, 8), block(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(nn.functional.max_pool2d(a, 2))
        c = self.middle(nn.functional.max_pool2d(b, 2))
        c = self.up2(torch.cat([nn.functional.interpolate(c, scale_factor=2), b], 1))
        return self.out(self.up1(torch.cat([nn.functional.interpolate(c, scale_factor=2), a], 1)))


def _unet() -> Made:
    return _UNet(), torch.randn(2, 3, 16, 16)


def _conv1d() -> Made:
    layers = [nn.Conv1d(8, 8, 5, padding=2), nn.InstanceNorm1d(8), nn.LeakyReLU(), nn.Conv1d(8, 8, 5), nn.PReLU()]
    return nn.Sequential(*layers), torch.randn(4, 8, 64)


def _encoder() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(4, 16, 32)


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.rnn = kind(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 20))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def _lstm() -> Made:
    return _Recurrent(nn.LSTM), torch.randint(0, 20, (4, 24))


def _gru() -> Made:
    return _Recurrent(nn.GRU), torch.randint(0, 20, (4, 24))


def _frozen_prefix() -> Made:
    net = _mlp_dropout()[0]
    net[0].requires_grad_(False)
    return net, _rows()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + self.block(x)
        return x


def _shared_block() -> Made:
    return _Tied(), _rows()


def _language_model(kind: str, **small: Any) -> Callable[[], Made]:
    def make() -> Made:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=64, **small)).train()
        ids = torch.randint(3, 64, (2, 32))
        return model, {"input_ids": ids, "labels": ids}

    return make


_LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

ORDINARY: dict[str, Callable[[], Made]] = {
    "mlp": _mlp,
    "mlp, in-place": _mlp_in_place,
    "mlp, dropout": _mlp_dropout,
    "mlp, batch norm": _mlp_batch_norm,
    "mlp, float64": _mlp_float64,
    "mlp, bfloat16": _mlp_bfloat16,
    "mlp, autocast": _autocast,
    "resnet": _resnet,
    "densenet": _densenet,
    "unet": _unet,
    "conv1d": _conv1d,
    "transformer encoder": _encoder,
    "lstm": _lstm,
    "gru": _gru,
    "frozen prefix": _frozen_prefix,
    "shared block": _shared_block,
    "gpt2": _language_model("gpt2", n_layer=2, n_embd=32, n_head=2, bos_token_id=0, eos_token_id=0),
    "llama": _language_model("llama", **_LLAMA),
    "qwen3": _language_model("qwen3", num_key_value_heads=2, head_dim=16, **_LLAMA),
    "mixtral": _language_model("mixtral", num_key_value_heads=2, num_local_experts=4, **_LLAMA),
}
