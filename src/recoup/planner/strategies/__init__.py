"""Strategies that propose decisions: one file an action."""
