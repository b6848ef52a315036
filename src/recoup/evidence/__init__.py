"""Proof: the planned step beside the plain one, values, memory and time."""
