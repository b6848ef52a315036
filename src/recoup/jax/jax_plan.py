"""A JAX plan: plain data, JSON; what `recoup.jax.plan` returns and `recoup.jax.apply` reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from recoup.errors import UsageError
from recoup.ir.fields import check_schema, read_fields
from recoup.ir.plan import Prediction
from recoup.jax.layout import Segment, segment_from_json

SCHEMA = "recoup-jax-plan/1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JaxPlan:
    """Which values of a step are held for backward, and what that is predicted to cost.

    Attributes:
        step_name: of the loss function. fingerprint: of its trace.
        segments: what runs as written and what runs again, around which names. names: every value held, with bytes.
        budget_bytes: what it was made for: arguments, outputs (loss and gradients), temporaries and, where an optimizer
            was given, its state, on one device. budget_text: as the user wrote it.
        predicted: simulated on the jaxpr. device: whose rates the seconds are of, "any" for FLOPs alone.
        temporary_bytes, plain_temporary_bytes: the part of the peaks that a compiler allocates and frees in the step.
        compiled_temporary_bytes: what the compiler here allocates for the plan's step; None: it was not compiled.
        notes: sentences for people. versions: of recoup and jax.
    """

    step_name: str
    fingerprint: str
    segments: tuple[Segment, ...]
    names: tuple[tuple[str, int], ...]
    budget_bytes: int
    budget_text: str
    device: str
    predicted: Prediction
    temporary_bytes: int
    plain_temporary_bytes: int
    compiled_temporary_bytes: int | None = None
    notes: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data, keys in a stable order."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, one that diffs well."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> JaxPlan:
        """Reads what `to_json` returned.

        Raises:
            UsageError: if it is not a plan of this schema, or a field does not fit.
        """
        check_schema(data, SCHEMA)
        fields = {k: v for k, v in data.items() if k not in ("schema", "predicted", "segments")}
        predicted = read_fields(Prediction, data.get("predicted"), "The plan's prediction")
        try:
            segments = tuple(map(segment_from_json, data["segments"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"Not a complete recoup plan of a JAX step: {error}.") from error
        return read_fields(cls, fields, "The plan", predicted=predicted, segments=segments)

    @classmethod
    def load(cls, path: str | Path) -> JaxPlan:
        """Reads a plan written by `save`.

        Raises:
            UsageError: if the file is missing or is not such a plan.
        """
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise UsageError(f"No plan file at {str(path)!r}.") from None
        except json.JSONDecodeError as error:
            raise UsageError(f"{str(path)!r} is not JSON: {error}. Give what `save` wrote.") from None
        return cls.from_json(data)

    def __str__(self) -> str:
        from recoup.jax.text import format_plan  # stands above: only needed when somebody prints

        return format_plan(self)
