"""Plan files are data from strangers: whatever is in one, it is read, or refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import recoup
from recoup.cli.main import run
from recoup.ir.plan import Plan
from tests.safety.helpers import Net, square
from tests.thorough import IS_THOROUGH

NUM_MUTANTS = 500 if IS_THOROUGH else 100
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 1e300, 10**30, "", "x\ny", "\ud800", "\x1b[31m", [], {}, [[]], {"a": 1}, "..", "a..b"),
    *("recompute", "\u00b2", "x" * 5000),
)
WHOLE = (
    *(b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe\x00", b"", b"null", b"1" * 5000, b'"x"', b"[]", b"{}"),
    *(b'{"schema": "recoup-plan/2", "budget_bytes": Infinity}', b'{"schema": NaN}'),
)


@pytest.fixture(scope="module")
def good() -> bytes:
    made = recoup.plan(Net(), (torch.randn(256, 8),), loss=square, budget="75%")
    return json.dumps(made.to_json()).encode()


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [p for key, value in items for p in [(*path, key), *_places(value, (*path, key))]]


def mutate(good: bytes, rng: random.Random) -> bytes:
    how = rng.randrange(6)
    if how == 0:
        changed = bytearray(good)
        for _ in range(rng.choice([1, 3, 20])):
            changed[rng.randrange(len(good))] = rng.randrange(256)
        return bytes(changed)
    if how == 1:
        return good[: rng.randrange(len(good))]
    if how == 2:
        return rng.choice(WHOLE)
    data = json.loads(good)
    *above, key = rng.choice(_places(data))
    holder = data
    for step in above:
        holder = holder[step]
    if how == 3:
        del holder[key]
    elif how == 4 and isinstance(holder, dict):
        holder["more\n\x1b"] = 1
    else:
        holder[key] = rng.choice(VALUES)
    return json.dumps(data).encode()


@pytest.mark.slow
def test_mutated_files_are_refused_in_one_line(good: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rng, num_refused = tmp_path / "plan.json", random.Random(5), 0
    for number in range(NUM_MUTANTS):
        path.write_bytes(mutate(good, rng))
        code = run(["show", str(path)])
        out, err = capsys.readouterr()
        if code == 0:  # another plan, but a plan
            assert json.dumps(Plan.load(path).to_json())
            assert out.encode()
            assert not err
        else:
            num_refused += 1
            assert code == 2, number
            assert err.count("\n") == 1, err
            assert err.rstrip("\n").isprintable(), err
            assert not out
    assert num_refused > NUM_MUTANTS * 0.8


def test_a_directory_and_an_unknown_action(good: bytes, tmp_path: Path) -> None:
    assert run(["show", str(tmp_path)]) == 2
    data = json.loads(good)
    data["decisions"] = [{"action": "delete", "path": ""}]
    with pytest.raises(recoup.UsageError, match="unknown action 'delete'"):
        Plan.from_json(data)
