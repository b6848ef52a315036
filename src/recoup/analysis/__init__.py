"""What a priced trace says: memory over the step, the module table, the profile; no torch."""
