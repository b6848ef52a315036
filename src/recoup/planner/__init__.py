"""A budget becomes a plan: strategies propose decisions, the simulator judges them, the driver selects."""
