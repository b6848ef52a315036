"""One training step, captured: which ops ran in which call, which storages lived when, what autograd kept."""
