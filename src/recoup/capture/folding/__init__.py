"""Calls of a loop that are alike are captured a few times; one entrance: fold.Folding."""
