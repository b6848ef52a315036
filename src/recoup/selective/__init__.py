"""Activation checkpointing by configuration: the classes people know, on recoup's own stages.

`CheckpointConfig` says what is wanted, `SelectiveCheckpointer` turns it into decisions and hands them to the engine,
`MemoryProfiler` measures what layers hold, `CheckpointWrapper` makes one module a region, `checkpoint_ops` keeps what
some operators make and runs the rest again, and `ReversibleSequential` keeps no activations at all.
"""

from recoup.selective.checkpointer import SelectiveCheckpointer
from recoup.selective.config import CheckpointConfig
from recoup.selective.layers import PRESETS, find_layers
from recoup.selective.ops import OP_POLICIES, AppliedOps, checkpoint_ops
from recoup.selective.profile_report import LayerProfile, ProfileReport
from recoup.selective.profiler import MemoryProfiler
from recoup.selective.reversible import ReversibleSequential
from recoup.selective.wrapper import CheckpointWrapper

__all__ = [
    "OP_POLICIES",
    "PRESETS",
    "AppliedOps",
    "CheckpointConfig",
    "CheckpointWrapper",
    "LayerProfile",
    "MemoryProfiler",
    "ProfileReport",
    "ReversibleSequential",
    "SelectiveCheckpointer",
    "checkpoint_ops",
    "find_layers",
]
