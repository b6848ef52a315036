"""diffusers' UNet, as Stable Diffusion trains it: recoup fit examples/today/text_to_image.py --budget 60%"""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.nn import functional


def step(model, batch):
    """The noise that was added, guessed from the noisy latents, the time and the text."""
    latents, noise, times, text = batch
    noisy = DDPMScheduler().add_noise(latents, noise, times)
    return functional.mse_loss(model(noisy, times, encoder_hidden_states=text).sample, noise)


def target(batch=4):
    """Returns a UNet of three levels with cross-attention, latents, noise, times and embedded text."""
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    latents, noise = torch.randn(2, batch, 4, 32, 32)
    inputs = (latents, noise, torch.randint(0, 1000, (batch,)), torch.randn(batch, 12, 24))
    return {"model": model.train(), "batch": inputs, "step": step, "optimizer": torch.optim.AdamW}
