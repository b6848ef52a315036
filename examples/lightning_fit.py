"""Lightning inside a byte budget, planned from the first batch: python examples/lightning_fit.py"""

import lightning.pytorch as lightning
import torch
from torch import nn

from recoup.integrations.lightning import RecoupCallback


class Net(lightning.LightningModule):
    """A stack of pre-norm blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
        self.net = nn.Sequential(*blocks)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        loss = (self.net(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters())


callback = RecoupCallback(budget="75%")
trainer = lightning.Trainer(max_steps=4, accelerator="cpu", devices=1, logger=False, callbacks=[callback])
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(2048, 32), batch_size=512))
print(callback.report())
