"""TARGETs of the command line: from a text to a model, a batch, and perhaps a loss and an optimizer."""
