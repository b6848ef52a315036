"""A language model's loss without its logits."""
