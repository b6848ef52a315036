"""Tests. What is set here is set before anything is imported that reads it."""

from __future__ import annotations

import os

# Compiling is most of what tests of JAX take; how well is nothing they look at.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
