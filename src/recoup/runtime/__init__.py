"""Code that runs during training: patched forwards, recomputed regions, rederived, offloaded and tiled tensors."""
