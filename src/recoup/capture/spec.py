"""The step to capture, as the user gave it, and what captures of it found out."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from recoup.capture.draws import NO_WORDS, Draw, Words
from recoup.capture.folding import FoldingMemory
from recoup.capture.method_calls import Method
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.snapshot import KnownState
from recoup.capture.step import Objective


@dataclasses.dataclass(kw_only=True)
class Carried:
    """What a forward was found to leave for the next one: then the step that is captured is not the first.

    Attributes:
        keepers: sentences about code outside of the model that keeps its tensors.
        differs: whether a second forward runs other ops.
    """

    keepers: list[str] = dataclasses.field(default_factory=list)
    differs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One training step, as the user gave it.

    Attributes:
        objective: what it computes of the batch.
        dialect: "cpu" or "cuda": the device type whose side outputs, optimizer implementation and allocator count.
        capability: compute capability of the planned card if it is not in this machine: ops are chosen as it would;
            None: the ops are those of the model's own device.
        round_bytes: the allocator's granularity.
        keep: paths of modules whose forward runs once: no region and no tile contains them or lies around them.
        folding: facts about the step's loops that captures share; None: loops are captured in full.
        carried: what captures found that a forward leaves for the next.
        draw, draw_words: state of python's and numpy's random streams, see `draws`.
        methods: those that the step was found to call from outside, other than forward.
        known_state: the snapshot of a series of captures between which no other code runs.
    """

    model: nn.Module
    batch: Any
    objective: Objective = dataclasses.field(default_factory=Objective)
    optimizer: OptimizerLike | None = None
    dialect: str = "cpu"
    capability: tuple[int, int] | None = None
    round_bytes: int = 1
    keep: frozenset[str] = frozenset()
    folding: FoldingMemory | None = dataclasses.field(default_factory=FoldingMemory, compare=False)
    draw: int = Draw.AS_IT_IS
    draw_words: Words = NO_WORDS
    carried: Carried = dataclasses.field(default_factory=Carried, compare=False)
    methods: dict[Method, None] = dataclasses.field(default_factory=dict, compare=False)
    known_state: KnownState = dataclasses.field(default_factory=KnownState, compare=False)
