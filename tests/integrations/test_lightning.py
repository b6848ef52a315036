"""The real Lightning Trainer: the same weights with a plan, the peak under the budget, nothing left behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from recoup.errors import UsageError
from tests.models import Stack
from tests.thorough import cases

lightning = pytest.importorskip("lightning.pytorch")

from recoup.integrations.lightning import RecoupCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A net called by name in training_step, which logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _train(module: nn.Module, folder: Path, *callbacks: Any, **options: Any) -> None:
    data = torch.randn(1536, 32, generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        max_steps=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **options,
    )
    torch.manual_seed(0)
    trainer.fit(module, DataLoader(data, batch_size=512))


_OPTIONS: list[dict[str, Any]] = [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}]
_OPTIONS.append({**_OPTIONS[1], **_OPTIONS[2]})


class _Measure(RecoupCallback):
    """Measures without a plan."""

    def _install(self, *args: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("options", cases(_OPTIONS, _OPTIONS[3:]), ids=str)
def test_training_is_the_same_and_fits(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module = Module()
    twin = copy.deepcopy(module)
    plain = _Measure("1GiB")
    _train(twin, tmp_path, plain, **options)
    assert plain.meter.peak_bytes is not None
    callback = RecoupCallback(int(plain.meter.peak_bytes * 0.85))
    _train(module, tmp_path, callback, **options)
    assert module.losses == twin.losses
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    assert callback.plan is not None
    assert callback.plan.decisions
    assert callback.meter.num_replays + callback.meter.num_rederived > 0
    assert callback.meter.peak_bytes is not None
    assert callback.meter.peak_bytes <= callback.plan.budget_bytes
    assert "training_step" not in module.__dict__
    assert not any("forward" in m.__dict__ for m in module.modules())


@pytest.mark.slow
def test_a_plan_is_used_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Module()
    twin = copy.deepcopy(module)
    first = RecoupCallback("80%")
    _train(module, tmp_path, first)
    second = RecoupCallback(plan=first.plan)
    _train(twin, tmp_path, second)
    assert module.losses == twin.losses
    assert second.meter.num_replays == first.meter.num_replays


class _WithoutIndex(Module):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)


class _OwnHook(Module):
    """Its `training_step` reads what its hook of each batch sets."""

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.weight = 1 + 0.1 * batch_idx

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.weight * super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [_WithoutIndex, _OwnHook])
def test_what_lightning_lets_a_module_do_is_planned(tmp_path: Path, kind: type[Module]) -> None:
    torch.manual_seed(1)
    module = kind()
    twin = copy.deepcopy(module)
    _train(twin, tmp_path)
    callback = RecoupCallback("80%")
    _train(module, tmp_path, callback)
    assert callback.plan is not None and callback.plan.decisions and callback.meter.peak_bytes is not None
    assert module.losses == twin.losses and len(module.losses) == 3
    assert not {"training_step", "on_train_batch_start"} & vars(module).keys()


class _ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Iterates(Module):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize(("kind", "message"), [(_ByHand, "optimizes by hand"), (_Iterates, "takes a dataloader_iter")])
def test_what_cannot_be_planned_is_refused_before_the_first_batch(
    tmp_path: Path, kind: type[Module], message: str
) -> None:
    with pytest.raises(UsageError, match=f"{message}.*recoup.fit on the net"):
        _train(kind(), tmp_path, RecoupCallback("80%"))


def test_budget_or_plan() -> None:
    with pytest.raises(UsageError, match="one of the two"):
        RecoupCallback()
