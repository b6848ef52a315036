"""Views of a priced trace: memory over the step, the module table, the profile; no torch."""
