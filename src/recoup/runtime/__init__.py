"""Code that runs in training: patched forwards, regions, rederived saved tensors."""
