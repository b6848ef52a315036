"""Tile: the loss, and position-wise modules, over tiles of tokens."""
