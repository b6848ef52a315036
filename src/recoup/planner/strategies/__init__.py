"""What can be proposed: one file an action."""
