"""Plain data that travels between the stages: JSON in, JSON out, no torch."""
