"""A byte budget for `torch.compile`: what a joint graph holds for backward, and where the rest is rebuilt."""
