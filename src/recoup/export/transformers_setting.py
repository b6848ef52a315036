"""A plan as transformers' own setting, when it is one: every layer, or every n-th, each by itself."""

from __future__ import annotations

import re

from recoup.errors import UsageError
from recoup.export.left_out import Export, changed_again, header, left_out, regions_of
from recoup.ir.plan import Plan

_LAYER = re.compile(r"^(?P<stack>.*\.)(?P<number>\d+)$")


def every_n_layers(plan: Plan) -> int:
    """Returns n where the plan's regions are layers 0, n, 2n, ... of one list.

    Raises:
        UsageError: if they are not; says what they are instead.
    """
    regions = regions_of(plan, target="transformers' every_n_layers")
    stacks, numbers = set(), []
    for decision in regions:
        match = _LAYER.match(decision.path)
        if match is None or len(decision.paths) > 1:
            what = (
                f"`{decision.path}` through `{decision.paths[-1]}`" if len(decision.paths) > 1 else f"`{decision.path}`"
            )
            raise UsageError(
                f"transformers recomputes whole layers one by one; this plan has the region {what}. Use --to torch."
            )
        stacks.add(match["stack"])
        numbers.append(int(match["number"]))
    numbers.sort()
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if len(stacks) != 1 or numbers[0] != 0 or step == 0 or numbers != list(range(0, numbers[-1] + 1, step)):
        shown = ", ".join(str(n) for n in numbers[:12]) + (", ..." if len(numbers) > 12 else "")
        raise UsageError(
            f"transformers recomputes layers 0, n, 2n, ...; this plan recomputes layers {shown} of "
            f"{', '.join(sorted(stacks))}. Use --to torch."
        )
    return step


def export_transformers(plan: Plan) -> Export:
    """Returns a file with `apply_plan(model)`, which sets and checks transformers' own checkpointing.

    Raises:
        UsageError: if the plan is not every n-th layer.
    """
    step = every_n_layers(plan)
    paths = [d.path for d in plan.regions]
    missing = left_out(plan) + changed_again(plan)
    code = f'''{header(plan, what="transformers' activation checkpointing", sentences=missing)}
# The same in TrainingArguments (then leave out `apply_plan`):
#   activation_checkpointing=True,
#   activation_checkpointing_kwargs={{"use_reentrant": False, "every_n_layers": {step}}},
EVERY_N_LAYERS = {step}
LAST = {paths[-1]!r}


def apply_plan(model):
    """Turns it on, and checks that the layers are those of the plan.

    Attributes that their forwards change (a counter) change again in the second run, which finds them changed.
    """
    model.activation_checkpointing_enable({{"use_reentrant": False}}, every_n_layers=EVERY_N_LAYERS)
    chosen = [name for name, module in model.named_modules() if vars(module).get("gradient_checkpointing")]
    layers = [name for name in chosen if name.rpartition(".")[2].isdigit()]
    if len(layers) != {len(paths)} or layers[-1] != LAST:
        raise ValueError(f"the plan has {len(paths)} layers up to {{LAST}}; transformers chose {{layers}}")
'''
    return Export(code=code, left_out=missing)
