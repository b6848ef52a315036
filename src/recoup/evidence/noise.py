"""What a loss is multiplied by to see how much of its gradients is rounding."""

from __future__ import annotations

NOISE_FACTOR = 1.1
"""No power of two: a loss multiplied by it has its gradients rounded anew at every step of backward."""
