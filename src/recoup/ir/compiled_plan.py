"""What a compiled step holds for backward, graph by graph: plain data, JSON, independent of torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from recoup.errors import UsageError
from recoup.units import format_bytes

SCHEMA = "recoup-compiled-plan/3"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphChoice:
    """How a joint graph is divided, by names of its nodes.

    Attributes:
        held: kept for backward. rerun: run again in backward. order: of all ops of backward, those that run again as
            often as they do.
    """

    held: tuple[str, ...]
    rerun: tuple[str, ...]
    order: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """One graph of a compiled step.

    Attributes:
        fingerprint: tells the joint graph.
        num_calls: how often a step runs it.
        num_ops: of its forward.
        choice: how it is divided.
        held_bytes: kept for backward.
        rerun_seconds: an estimate by which choices are ranked, FLOPs first.
        is_torch: whether the graph is divided as torch itself would.
    """

    fingerprint: str
    num_calls: int
    num_ops: int
    choice: GraphChoice
    held_bytes: int
    rerun_seconds: float
    is_torch: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPlan:
    """A compiled step within a budget.

    Attributes:
        model_class: the class's name.
        backend: "inductor" or "aot_eager".
        torch_version: whose graphs these are.
        budget_bytes: what was asked.
        predicted_peak_bytes: of the whole step, said before it was compiled.
        plain_peak_bytes: measured, of the step as torch compiles it.
        graphs: in the order in which they first ran.
        notes: what a reader should know.
    """

    model_class: str
    backend: str
    torch_version: str
    budget_bytes: int
    predicted_peak_bytes: int
    plain_peak_bytes: int
    graphs: tuple[CompiledGraph, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> CompiledPlan:
        """Reads what `to_json` returned.

        Raises:
            UsageError: if it is something else.
        """
        if data.get("schema") != SCHEMA:
            raise UsageError(f"Not a plan of a compiled step: its schema is {data.get('schema')!r}, not {SCHEMA!r}.")
        graphs = tuple(
            CompiledGraph(**{**graph, "choice": GraphChoice(**{k: tuple(v) for k, v in graph["choice"].items()})})
            for graph in data["graphs"]
        )
        rest = {k: v for k, v in data.items() if k not in ("schema", "graphs", "notes")}
        return CompiledPlan(**rest, graphs=graphs, notes=tuple(data["notes"]))

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> CompiledPlan:
        """Reads a plan that `save` wrote."""
        return CompiledPlan.from_json(json.loads(Path(path).read_text(encoding="utf-8")))

    def __str__(self) -> str:
        lines = [f"{self.model_class}, compiled by {self.backend}: {len(self.graphs)} graph(s)"]
        for graph in self.graphs:
            times = f", {graph.num_calls} times a step" if graph.num_calls > 1 else ""
            lines.append(
                f"  - {graph.num_ops} ops of forward{times}: holds {len(graph.choice.held)} values "
                f"({format_bytes(graph.held_bytes)}), {len(graph.choice.rerun)} ops run again"
                + (" (as torch divides it)" if graph.is_torch else "")
            )
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)
