"""Video: diffusers' Wan, trained by flow matching: recoup fit examples/today/video.py --budget 60%"""

import torch
from diffusers import WanTransformer3DModel
from torch.nn import functional


def step(model, batch):
    """The way from clip to noise, guessed from a place on it, the time and the text."""
    clip, noise, times, text = batch
    share = (times / 1000).view(-1, 1, 1, 1, 1)
    made = model((1 - share) * clip + share * noise, timestep=times, encoder_hidden_states=text).sample
    return functional.mse_loss(made, noise - clip)


def target(batch=1, frames=5):
    """Returns a Wan of three blocks, latents of clips, noise, times and embedded text."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=128,
        num_layers=3,
        rope_max_seq_len=32,
    )
    clip, noise = torch.randn(2, batch, 4, frames, 16, 16)
    inputs = (clip, noise, torch.randint(0, 1000, (batch,)), torch.randn(batch, 8, 32))
    return {"model": model.train(), "batch": inputs, "step": step, "optimizer": torch.optim.AdamW}
