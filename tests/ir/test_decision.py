"""Decisions: each checks itself, is written and read back, and says itself in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recoup.errors import UsageError
from recoup.ir.decision import (
    DECISIONS,
    Decision,
    Loop,
    LossInPlace,
    Offload,
    OpMark,
    Rebuild,
    Recompute,
    Rederive,
    Save,
    Scan,
    TileLoss,
    TileModule,
    describe_decisions,
    kinds,
    read_decision,
)
from recoup.ir.plan import Plan
from tests.ir.test_schema import make_plan

EACH: tuple[Decision, ...] = (
    Save(path="head", call=1),
    Rederive(path=""),
    Recompute(path="layers.0", span=("layers.1",), inside="rederive", keep=("attention",), offload=True),
    Loop(path="cell", chunk=8, calls=40, buffers=("cell.count",)),
    Scan(path="rnn", index=1, budget_bytes=1 << 20),
    TileLoss(path="head", tile_tokens=64),
    LossInPlace(path="", rows=64),
    TileModule(path="layers.0.mlp", tile_tokens=128),
    Offload(path="layers.2", inside="rederive"),
    Rebuild(
        path="",
        marks=(
            OpMark(path="", call=0, ordinal=4, op="aten.add.Tensor", begins_segment=True),
            OpMark(path="layers.3", call=1, ordinal=0, op="aten.mm.default", holds=True),
        ),
    ),
)


def test_each_action_has_a_case() -> None:
    assert {type(d) for d in EACH} == set(DECISIONS)
    assert len({kind.action for kind in DECISIONS}) == len(DECISIONS)


@pytest.mark.parametrize("decision", EACH, ids=lambda d: d.action)
def test_a_decision_is_read_back_from_its_json(decision: Decision) -> None:
    assert read_decision(json.loads(json.dumps(decision.to_json()))) == decision
    plan = make_plan(decisions=(decision,))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"action": "save"}, "Decision 'save' for `?`: the field 'path' is missing."),
        ({"action": "save", "path": "a", "span": ["b"]}, "it has no field 'span'; its fields are path, call."),
        ({"action": "forget", "path": "a"}, "unknown action 'forget'; known are recompute, loop"),
        ({"path": "a"}, "unknown action None"),
        (
            {"action": "rebuild", "path": "", "marks": [{"path": ""}]},
            "each of marks has the fields begins_piece, begins_segment",
        ),
        ({"action": "rebuild", "path": "", "marks": 3}, "marks must be a list"),
        ({"action": "rebuild", "path": "layers"}, "it is about the whole step"),
        ({"action": "loss-in-place", "path": "head", "rows": 64}, "it is about the whole step"),
        ({"action": "loss-in-place", "path": "", "rows": 0}, "rows must be at least 1; got 0"),
        (
            {"action": "rebuild", "path": "", "marks": [{"path": "", "call": -1, "ordinal": 0, "op": "aten.mm"}]},
            "A mark counts calls and ops from 0; got -1 and 0.",
        ),
        ("save", "A decision is an object with `action` and `path`; got 'save'."),
        ({"action": "save", "path": 3}, "path must be a text; got 3."),
        ({"action": "save", "path": "a..b"}, "path must be module names with single dots between them; got 'a..b'."),
        ({"action": "save", "path": "a", "call": -1}, "call must be at least 0; got -1."),
        ({"action": "save", "path": "a", "call": True}, "call must be a whole number or nothing; got True."),
        ({"action": "recompute", "path": "a", "inside": "tile"}, "inside must be 'save' or 'rederive'; got 'tile'."),
        ({"action": "recompute", "path": "a", "span": "b"}, "span must be a tuple of texts; got 'b'."),
        ({"action": "recompute", "path": "a", "keep": [3]}, "keep must be a tuple of texts; got (3,)."),
        ({"action": "recompute", "path": "a", "offload": 1}, "offload must be true or false; got 1."),
        ({"action": "recompute", "path": "a", "chunk": 4}, "it has no field 'chunk'"),
        ({"action": "loop", "path": "a"}, "the field 'chunk' is missing."),
        ({"action": "loop", "path": "a", "chunk": 0}, "chunk must be at least 1; got 0."),
        ({"action": "loop", "path": "a", "chunk": 2, "calls": 0}, "calls must be at least 1; got 0."),
        ({"action": "loop", "path": "a", "chunk": 2, "call": 1}, "it is about all calls of its module"),
        ({"action": "scan", "path": "a", "index": -1, "budget_bytes": 8}, "index must be at least 0; got -1."),
        ({"action": "scan", "path": "a", "index": 0, "budget_bytes": 0}, "budget_bytes must be at least 1; got 0."),
        ({"action": "tile-loss", "path": "a", "tile_tokens": 0}, "tile_tokens must be at least 1; got 0."),
        ({"action": "tile-module", "path": "a", "tile_tokens": 1.5}, "tile_tokens must be a whole number; got 1.5."),
        ({"action": "offload", "path": "a", "inside": None}, "inside must be 'save' or 'rederive'; got None."),
    ],
)
def test_what_is_no_decision_is_refused_in_one_line(data: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Plan.from_json({**make_plan().to_json(), "decisions": [data]})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_decisions_in_words() -> None:
    assert describe_decisions(()) == ["nothing is changed"]
    parts = [d for d in EACH if not d.is_whole_step]
    assert describe_decisions(parts) == [
        "recompute layers.0 through 1 (rederiving inside), keeping attention, inputs offloaded",
        "recompute cell, 8 calls at a time, the first 40 calls",
        "recompute steps of scan 1 of rnn in 1.0 MiB",
        "take the loss 64 rows at a time, its gradient in place of the logits",
        "tile head and its loss by 64 tokens",
        "tile layers.0.mlp by 128 tokens",
        "offload what is saved in layers.2, but what rederives",
        "rederive everywhere else",
        "save head",
    ]
    assert describe_decisions(EACH[-1:]) == [
        "rebuild by running ops again, in 1 segment",
        "hold mm in layers.3",
    ]
    layers = [Recompute(path=f"layers.{i}", span=(f"layers.{i + 1}",)) for i in (0, 2, 4)]
    assert describe_decisions(layers) == ["recompute layers.0,2,4 each through 1", "save everywhere else"]
    assert describe_decisions((Rederive(path=""),)) == ["rederive everywhere"]
    assert describe_decisions((Rederive(path="norm"),)) == ["rederive norm", "save everywhere"]


def test_kinds_are_what_explain_takes_away_together() -> None:
    layers = [Recompute(path=f"layers.{i}") for i in range(3)]
    found = kinds([Rederive(path=""), *layers, Recompute(path="head"), Save(path="tail")])
    assert [len(members) for members in found] == [3, 1, 1]


def test_a_decision_for_other_paths() -> None:
    decision = Recompute(path="a", span=("b",), buffers=("a.count", "steps"))
    assert decision.renamed({"a": "m.a", "b": "m.b"}) == Recompute(
        path="m.a", span=("m.b",), buffers=("m.a.count", "steps")
    )


def test_a_decision_made_by_the_name_of_its_action_is_one_of_its_class() -> None:
    made = Decision(path="encoder", action="recompute", offload=True)
    assert made == Recompute(path="encoder", offload=True)
    with pytest.raises(UsageError, match="unknown action"):
        Decision(path="", action="forget")
