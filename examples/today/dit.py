"""diffusers' diffusion transformer: recoup fit examples/today/dit.py --budget 60%"""

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from torch.nn import functional


def step(model, batch):
    """The noise that was added, guessed from the noisy latents, the time and the class."""
    latents, noise, times, classes = batch
    noisy = DDPMScheduler().add_noise(latents, noise, times)
    return functional.mse_loss(model(noisy, timestep=times, class_labels=classes).sample, noise)


def target(batch=16):
    """Returns a DiT of three blocks, latents, noise, times and classes."""
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        num_layers=3,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    latents, noise = torch.randn(2, batch, 4, 16, 16)
    inputs = (latents, noise, torch.randint(0, 1000, (batch,)), torch.randint(0, 10, (batch,)))
    return {"model": model.train(), "batch": inputs, "step": step, "optimizer": torch.optim.AdamW}
