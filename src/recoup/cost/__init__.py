"""Seconds and hidden workspace of each op: measured, from a roofline, or from FLOPs alone."""
