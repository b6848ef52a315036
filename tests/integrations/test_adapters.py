"""Other libraries' names: the regions they make, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.errors import UsageError
from recoup.integrations.adapters import checkpoint, checkpoint_wrapper, configure, recompute
from recoup.runtime import execution_context
from tests.models import make, same, step


def _replays(model: nn.Module, batch: object) -> tuple[int, list[torch.Tensor]]:
    before = execution_context.counters()[0]
    result = step(model, batch)
    return execution_context.counters()[0] - before, result


def test_checkpoint_wrapper() -> None:
    model, batch, _ = make("batch-norm")
    expected = step(make("batch-norm")[0], batch)
    keys = list(model.state_dict())
    for i in range(4):
        layer = model.layers[i]  # type: ignore[union-attr, index]
        assert checkpoint_wrapper(layer) is layer
    assert list(model.state_dict()) == keys
    number, found = _replays(model, batch)
    assert number == 4
    assert same(found, expected)
    with pytest.raises(UsageError, match="save_on_cpu"):
        checkpoint_wrapper(nn.Linear(2, 2), offload_to_cpu=True)


@pytest.mark.parametrize(
    ("options", "regions"),
    [
        ({"recompute_modules": ["mlp"]}, 3),
        ({"recompute_modules": ["layernorm", "mlp"]}, 9),
        ({"recompute_granularity": "full"}, 3),
        ({"recompute_granularity": "full", "recompute_num_layers": 2}, 2),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_megatron_names(kind: str, options: dict[str, object], regions: int) -> None:
    model, batch, _ = make(kind)
    expected = step(make(kind)[0], batch)
    with recompute(model, **options):  # type: ignore[arg-type]
        number, found = _replays(model, batch)
    assert number == regions
    assert same(found, expected)


def test_megatron_names_that_are_not_there() -> None:
    model, _, _ = make("gpt2")
    with pytest.raises(UsageError, match="no module of GPT2LMHeadModel's layers is called 'mla_up_proj'"):
        recompute(model, recompute_modules=["mlp", "mla_up_proj"])
    assert not any("forward" in m.__dict__ for m in model.modules())


class _ByHand(nn.Module):
    def __init__(self, how: object) -> None:
        super().__init__()
        self.stack, self.how = make("stack")[0], how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.stack.layers:  # type: ignore[union-attr]
            x = self.how(layer, x, scale=0.5)  # type: ignore[operator]
        return self.stack.head(x).square().mean()  # type: ignore[operator]


def test_deepspeed_names() -> None:
    _, batch, _ = make("stack")
    configure(None, partition_activations=False, num_checkpoints=4)
    expected = step(_ByHand(lambda f, *a, **k: f(*a, **k)), batch)
    number, found = _replays(_ByHand(checkpoint), batch)
    assert number == 4
    assert same(found, expected)
    for option in ("partition_activations", "checkpoint_in_cpu"):
        with pytest.raises(UsageError, match=option):
            configure(None, **{option: True})  # type: ignore[arg-type]
