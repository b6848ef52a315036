"""What makes gradients differ that should not: rounding."""

NOISE_FACTOR = 1.1
"""What a loss is multiplied by to see how much of its gradients is rounding.

No power of two: a loss multiplied by it has its gradients rounded anew at every step of backward.
"""
