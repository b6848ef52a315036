"""Position-wise modules over tiles, proved position-wise first."""
