"""A plan of a compiled step as a Python file that needs torch alone: a backend for `torch.compile`.

The functions that divide a graph are recoup's own, copied by their text, so that both divide alike.
"""

from __future__ import annotations

import ast
import dataclasses
import pprint
from importlib.resources import files

from recoup.errors import UsageError
from recoup.export.left_out import Export
from recoup.ir.compiled_plan import CompiledPlan

_SPLITTING = (
    "_partitioners",
    "joint_graph_facts",
    "tidy_joint_graph",
    "overwriting",
    "has_storage",
    "belongs_to_backward",
    "split_joint_graph",
    "finish_split",
    "torch_partition",
    "size_hint",
)
_BACKENDS = {
    "inductor": (("_inductor_order", "inductor_backend"), 'inductor_backend(divide, "@@key@@", options or {})'),
    "aot_eager": (("aot_eager_backend",), "aot_eager_backend(divide)"),
}


def export_compiled(plan: CompiledPlan) -> Export:
    """Returns a file with `plan_backend()`, which divides the plan's graphs as the plan does.

    Raises:
        UsageError: if the plan holds what torch holds by itself, so that there is nothing to export.
    """
    planned = [graph for graph in plan.graphs if not graph.is_torch]
    if not planned:
        raise UsageError(
            "The plan divides every graph as torch does, which was within its budget: there is nothing to export. "
            "Use `model.compile()`, or plan for a smaller budget."
        )
    names, backend = _BACKENDS[plan.backend]
    overwrites = plan.backend != "inductor"
    graphs = {g.fingerprint: {**dataclasses.asdict(g.choice), "overwrites": overwrites} for g in planned}
    key = "planned " + " ".join(f"{graph.fingerprint} {graph.held_bytes}" for graph in planned)
    texts = _functions("_torch.py", (*_SPLITTING, *names))
    texts += _functions("compiled/partition.py", None)
    sentence = (
        f'"""A plan of {plan.model_class} for torch {plan.torch_version}, {plan.backend}: peak '
        f'{plan.predicted_peak_bytes} bytes.\n\nWritten by recoup; needs torch alone.\n"""'
    )
    parts = {
        "header": sentence,
        "graphs": pprint.pformat(graphs, width=110, compact=True),
        "backend": backend.replace("@@key@@", key),
        "functions": "\n\n\n".join(texts),
    }
    code = (files("recoup.export") / "templates" / "compiled.py.txt").read_text()
    for part, text in parts.items():
        code = code.replace(f"@@{part}@@", text)
    return Export(code=code.rstrip() + "\n", left_out=())


def _functions(file: str, names: tuple[str, ...] | None) -> list[str]:
    """Returns the texts of functions of a file of recoup's, all or those of these names."""
    source = (files("recoup") / file).read_text()
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    texts = [ast.get_source_segment(source, node) for node in found if names is None or node.name in names]
    return [text.replace("_torch.", "") for text in texts if text is not None]
