"""The loops that people train in: leaves, each for one package, imported by nobody else."""
