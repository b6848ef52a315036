"""Offload: saved tensors moved to host memory or disk and back before backward reads them."""
