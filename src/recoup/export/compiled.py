"""A plan of a compiled step as a Python file that needs torch alone: backends for `torch.compile`.

The functions that divide a graph are recoup's own, copied by their text, so that both divide alike.
"""

from __future__ import annotations

import ast
import dataclasses
import pprint
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from recoup.errors import UsageError
from recoup.export.left_out import Export
from recoup.ir.compiled_plan import CompiledGraph, CompiledPlan

_BACKENDS = {
    "inductor": 'inductor_backend(own, f"planned {hashlib.sha256(repr(graphs).encode()).hexdigest()}", options or {})',
    "aot_eager": "aot_eager_backend(own)",
}
_SOURCES = "compiled/partition.py", "_torch.py"


def export_compiled(plan: CompiledPlan) -> Export:
    """Returns a file with `compile_modules(model)`, which compiles the plan's modules and divides graphs as it does.

    Raises:
        UsageError: if the plan holds what torch holds by itself, so that there is nothing to export.
    """
    planned = [graph for graph in plan.graphs if not graph.is_torch]
    if not planned:
        raise UsageError(
            "The plan divides every graph as torch does, which was within its budget: there is nothing to export. "
            "Use `model.compile()`, or plan for a smaller budget."
        )
    variants = _variants(planned, overwrites=plan.backend != "inductor")
    way = "model.compile(backend=plan_backend())" if planned[0].modules == ("",) else "compile_modules(model)"
    sentence = (
        f'"""A plan of {plan.model_class} for torch {plan.torch_version}, {plan.backend}: peak '
        f"{plan.predicted_peak_bytes} bytes.\n\n`{way}` applies it. Written by recoup; needs torch alone.\n"
        '"""'
    )
    parts = {
        "header": sentence,
        "variants": pprint.pformat(variants, width=110, compact=True),
        "path": repr(planned[0].modules[0]),
        "backend": _BACKENDS[plan.backend],
    }
    code = (files("recoup.export") / "templates" / "compiled.py.txt").read_text()
    for part, text in parts.items():
        code = code.replace(f"@@{part}@@", text)
    code += "".join(f"\n\n\n{text}" for text in _definitions_for(code))
    return Export(code=code.rstrip() + "\n", left_out=())


def _variants(planned: Sequence[CompiledGraph], *, overwrites: bool) -> list[tuple[list[str], dict[str, Any]]]:
    """Returns paths of modules that make the same choices, with these by graph.

    A module that runs a graph which others ran when it was planned makes the last of that graph's choices.
    """
    others = {graph.fingerprint: graph for graph in planned}
    own: dict[str, dict[str, CompiledGraph]] = {}
    for graph in planned:
        for path in graph.modules:
            own.setdefault(path, {})[graph.fingerprint] = graph
    alike: dict[tuple[CompiledGraph, ...], list[str]] = {}
    for path, graphs in own.items():
        alike.setdefault(tuple({**others, **graphs}.values()), []).append(path)
    return [
        (paths, {g.fingerprint: {**dataclasses.asdict(g.choice), "overwrites": overwrites} for g in graphs})
        for graphs, paths in alike.items()
    ]


def _definitions_for(code: str) -> list[str]:
    """Returns the texts of recoup's own definitions that code uses, and those that these use."""
    found: dict[str, tuple[ast.stmt, str]] = {}
    for file in _SOURCES:
        source = (files("recoup") / file).read_text()
        for node in ast.parse(source).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found.update(dict.fromkeys(names, (node, source)))
    used, wanted = set[str](), _names(ast.parse(code)) & found.keys()
    while wanted:
        used |= wanted
        wanted = {name for w in wanted for name in _names(found[w][0])} & found.keys() - used
    texts = [ast.get_source_segment(source, node) for name, (node, source) in found.items() if name in used]
    return [text.replace("_torch.", "") for text in texts if text is not None]


def _names(tree: ast.AST) -> set[str]:
    """Returns the names that code reads, bare or of `_torch`."""
    bare = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return bare | {a.attr for a in attributes if isinstance(a.value, ast.Name) and a.value.id == "_torch"}
