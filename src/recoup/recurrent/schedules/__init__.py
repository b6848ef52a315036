"""Schedules for a loop over time: plain data and algorithms, one paper a file, no torch."""
