"""Rederive: saved tensors that are rebuilt by running recorded ops again, below autograd."""
