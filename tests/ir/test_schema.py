"""Plan files against their published schema, by a small validator of the keywords the schema uses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from recoup.errors import UsageError
from recoup.ir.decision import Recompute, Rederive, Save, Scan
from recoup.ir.plan import Plan, Prediction
from recoup.ir.schema import plan_schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "plan.schema.json"
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def make_plan(**changes: Any) -> Plan:
    predicted = Prediction(
        peak_bytes=600,
        plain_peak_bytes=1000,
        step_seconds=1.25,
        plain_step_seconds=1.0,
        recomputed_flops=20,
        plain_flops=100,
        saved_bytes=300,
        plain_saved_bytes=700,
        phase="backward",
        tensors=(("mm in layers.0", 64),),
        cost_source="flops",
    )
    fields: dict[str, Any] = {
        "decisions": (
            Rederive(path=""),
            Recompute(path="layers.0", span=("layers.1",), inside="rederive", keep=("attention",)),
            Recompute(path="layers.3", call=2, buffers=("layers.3.count",)),
            Scan(path="layers.4", index=1, budget_bytes=4096),
        ),
        "budget_bytes": 640,
        "budget_text": "640",
        "device": "cpu",
        "model_class": "Stack",
        "fingerprint": "abc",
        "structure": (("layers.0", "Block"),),
        "predicted": predicted,
        "notes": ("a note",),
        "versions": (("recoup", "0"),),
    }
    return Plan(**{**fields, **changes})


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], where: str = "$") -> list[str]:
    known = {"$ref", "const", "enum", "anyOf", "type", "items", "prefixItems", "minItems", "maxItems", "properties"}
    known |= {"required", "additionalProperties", "$schema", "title", "description", "$defs"}
    assert set(schema) <= known, f"the validator does not know {set(schema) - known}"
    if "$ref" in schema:
        return problems(value, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root, where)
    if "anyOf" in schema:
        tries = [problems(value, s, root, where) for s in schema["anyOf"]]
        return [] if any(not t for t in tries) else [problem for t in tries for problem in t]
    if "const" in schema and value != schema["const"]:
        return [f"{where} is not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where} is not one of {schema['enum']}"]
    kind = schema.get("type")
    if kind in ("integer", "number"):
        right = isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
        return [] if right else [f"{where} is no {kind}"]
    if kind is not None and not isinstance(value, _TYPES[kind]):
        return [f"{where} is no {kind}"]
    found = []
    if kind == "object":
        found += [f"{where}.{name} is missing" for name in schema["required"] if name not in value]
        found += [f"{where}.{name} is unknown" for name in value if name not in schema["properties"]]
        for name, inner in schema["properties"].items():
            if name in value:
                found += problems(value[name], inner, root, f"{where}.{name}")
    if kind == "array":
        if "minItems" in schema and not schema["minItems"] <= len(value) <= schema["maxItems"]:
            found.append(f"{where} has {len(value)} items")
        items = schema.get("prefixItems") or [schema["items"]] * len(value)
        for i, (item, inner) in enumerate(zip(value, items, strict=False)):
            found += problems(item, inner, root, f"{where}[{i}]")
    return found


def test_the_published_schema_is_the_dataclasses() -> None:
    assert json.loads(PUBLISHED.read_text()) == plan_schema()


def test_a_saved_plan_keeps_to_the_schema(tmp_path: Path) -> None:
    plan = make_plan()
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    schema = plan_schema()
    assert problems(data, schema, schema) == []
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": "recoup-plan/0"}, "$.schema is not 'recoup-plan/2'"),
        ({"budget_bytes": "640"}, "$.budget_bytes is no integer"),
        ({"surprise": 1}, "$.surprise is unknown"),
        ({"decisions": [{"path": "a", "action": "forget"}]}, "$.decisions[0].action is not 'recompute'"),
        ({"decisions": [{"path": "a", "action": "save", "span": []}]}, "$.decisions[0]"),
        ({"decisions": [{"action": "save"}]}, "$.decisions[0].path is missing"),
        ({"structure": [["a"]]}, "$.structure[0] has 1 items"),
    ],
)
def test_the_schema_refuses_what_is_no_plan(change: dict[str, Any], problem: str) -> None:
    schema = plan_schema()
    data = json.loads(json.dumps({**make_plan().to_json(), **change}))
    assert any(found.startswith(problem) for found in problems(data, schema, schema))


def test_plans_diff_well(tmp_path: Path) -> None:
    plan = make_plan()
    decisions = (Save(path=""), *plan.decisions[1:])
    plan.save(tmp_path / "a.json")
    make_plan(decisions=decisions).save(tmp_path / "b.json")
    a, b = ((tmp_path / n).read_text().splitlines() for n in ("a.json", "b.json"))
    assert sum(x != y for x, y in zip(a, b, strict=True)) == 1


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("recoup-plan/99", "a plan (recoup.Plan) of another version of recoup"),
        ("recoup-jax-plan/1", "This is a plan of a JAX step (recoup.jax.JaxPlan)"),
        ("recoup-compiled-plan/4", "This is a plan of a compiled step (recoup.CompiledPlan)"),
        ("something", "Not a recoup plan"),
        (None, "Not a recoup plan"),
    ],
)
def test_a_plan_of_another_kind_or_version_is_called_so(schema: Any, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        Plan.from_json({**make_plan().to_json(), "schema": schema})
