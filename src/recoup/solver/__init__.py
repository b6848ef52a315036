"""From priced calls to a plan: the frontier of bytes against time. No torch."""
