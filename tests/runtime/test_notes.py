"""What a region noted of its modules: taken again while it holds, put back where a replay alone changes something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import recoup
from recoup.ir.decision import Recompute
from recoup.runtime.apply import apply_decisions
from recoup.runtime.recompute.module_state import AttributeState


class _Writes(nn.Module):
    """Writes to its attributes in replays only, where nothing noted before could tell."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[int] = []
        self.known: dict[str, Any] = {"first": 1}
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.inner(x)) * self.scale
        if recoup.is_recomputing():
            self.seen.append(1)
            self.known.clear()
            self.scale, self.extra = 3.0, 1
        return torch.exp(out)


def test_what_a_replay_alone_writes_is_put_back() -> None:
    model = nn.Sequential(_Writes(), nn.Linear(4, 1))
    apply_decisions(model, [Recompute(path="0")])
    seen, known = model[0].seen, model[0].known
    for _ in range(3):  # from the second step on with notes of the one before
        model(torch.randn(2, 4)).sum().backward()
        assert model[0].seen is seen and seen == []
        assert model[0].known is known and known == {"first": 1}
        assert model[0].scale == 1.0 and not hasattr(model[0], "extra")


def test_a_note_is_taken_again_only_while_it_holds() -> None:
    module, notes = nn.Linear(2, 2), dict[str, Any]()

    def note() -> Any:
        AttributeState([("m", module)], notes=notes)
        return notes.get("m")

    first = note()
    assert first is not None and note() is first
    module.flag = True
    second = note()
    assert second is not first and second.kept["flag"] is True
    module.flag = False
    assert note() is not second
    handle = module.register_forward_hook(lambda *_: None)
    assert note() is None  # what a table holds may be large: it is not kept from one step to the next
    handle.remove()
    held = note()
    notes["m"], module = held, nn.Linear(2, 2)
    assert note() is not held  # of another module at the same path
