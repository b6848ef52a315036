"""Recompute: regions that keep their inputs and run their forward again in backward."""
