"""Lightning with a learning-rate schedule: python examples/loops/lightning_scheduler.py"""

import lightning.pytorch as lightning
import torch
from torch import nn

from recoup.integrations.lightning import RecoupCallback


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
        self.net, self.losses = nn.Sequential(*layers), []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]


def train(budget=None):
    lightning.seed_everything(0)
    model, data = Net(), torch.utils.data.DataLoader(torch.randn(2560, 32), batch_size=128)
    callback = RecoupCallback(budget=budget) if budget else None
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(max_steps=20, accelerator="cpu", callbacks=[callback] if callback else [], **quiet)
    trainer.fit(model, data)
    return [loss.item() for loss in model.losses], callback


if __name__ == "__main__":
    print(train("85%")[1])
