"""A plan as a Python file that needs PyTorch alone: `torch.utils.checkpoint`, and spans by saved-tensor hooks."""

from __future__ import annotations

import pprint
from importlib.resources import files

from recoup.errors import UsageError
from recoup.export.left_out import Export, header, left_out, regions_of
from recoup.ir.plan import Plan

_SPAN_IMPORTS = "import threading\nimport weakref\n"


def export_torch(plan: Plan) -> Export:
    """Returns a file with `apply_plan(model)`.

    The same gradients as the plan; for a plan of save and recompute, the same regions and so the same peak.

    Raises:
        UsageError: if the plan has no regions, tells calls of one module apart, or has a call in two regions.
    """
    regions = regions_of(plan, target="plain PyTorch")
    covered = [path for d in regions for path in d.paths]
    twice = next((path for path in covered if covered.count(path) > 1), None)
    if twice is not None:
        raise UsageError(
            f"`{twice}` is a call of two regions, one inside the other, which this export cannot write. Apply the plan "
            "with `recoup.apply(model, plan)`."
        )
    has_spans = any(len(d.paths) > 1 for d in regions)
    missing = left_out(plan)
    code = _template("plain_torch.py.txt")
    buffers = sorted({name for d in regions for name in d.buffers})
    parts = {
        "header": header(plan, what="Activation checkpointing", sentences=missing),
        "span_imports": _SPAN_IMPORTS if has_spans else "",
        "regions": pprint.pformat([d.paths for d in regions], width=110),
        "buffers": pprint.pformat(buffers, width=110),
        "forward": "part_of_region" if has_spans else "checkpointed",
        "span_code": _template("spans.py.txt") if has_spans else "",
    }
    for name, text in parts.items():
        code = code.replace(f"@@{name}@@", text)
    if has_spans:
        code = code.replace(
            "from torch.utils.checkpoint import checkpoint\n",
            "from torch.utils.checkpoint import checkpoint\n"
            "from torch.utils._pytree import tree_flatten, tree_unflatten\n",
        )
    return Export(code=code.rstrip() + "\n", left_out=missing)


def _template(name: str) -> str:
    return (files("recoup.export") / "templates" / name).read_text()
