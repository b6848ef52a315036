"""What a compiled step holds for backward, graph by graph: plain data, JSON, independent of torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from recoup.ir.fields import check_schema
from recoup.thresholds import MOST_NAMES
from recoup.units import format_bytes

SCHEMA = "recoup-compiled-plan/4"


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
    """One graph of a compiled step, and one choice for it.

    Attributes:
        fingerprint: tells the joint graph.
        modules: paths of the modules whose calls run it by this choice; "" is the model as a whole.
        num_calls: how often a step runs it so.
        num_ops: of its forward.
        choice: how it is divided.
        held_bytes: kept for backward.
        rerun_seconds: an estimate by which choices are ranked, FLOPs first.
        is_torch: whether the graph is divided as torch itself would.
    """

    fingerprint: str
    modules: tuple[str, ...]
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
        graphs: in the order in which they first ran; a graph with several choices once for each.
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
        check_schema(data, SCHEMA)
        graphs = tuple(
            CompiledGraph(
                **{
                    **graph,
                    "modules": tuple(graph["modules"]),
                    "choice": GraphChoice(**{k: tuple(v) for k, v in graph["choice"].items()}),
                }
            )
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
        num_graphs = len({graph.fingerprint for graph in self.graphs})
        lines = [f"{self.model_class}, compiled by {self.backend}: {num_graphs} graph(s), {len(self.graphs)} choice(s)"]
        for graph in self.graphs:
            times = f", {graph.num_calls} times a step" if graph.num_calls > 1 else ""
            lines.append(
                f"  - {_named(graph.modules)}{graph.num_ops} ops of forward{times}: "
                f"holds {len(graph.choice.held)} values ({format_bytes(graph.held_bytes)}), "
                f"{len(graph.choice.rerun)} ops run again" + (" (as torch divides it)" if graph.is_torch else "")
            )
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _named(paths: tuple[str, ...]) -> str:
    """Returns paths for a line; nothing for the model as a whole."""
    if paths == ("",):
        return ""
    left_out = len(paths) - MOST_NAMES
    return ", ".join(paths[:MOST_NAMES]) + (f" and {left_out} more: " if left_out > 0 else ": ")
