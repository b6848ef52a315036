"""Plans found before in this process: a second search for the same step and budget simulates its answer alone.

The same trace and the same costs give the same plan, so a search is known by them, by the budget and by what may be
chosen. What is kept are decisions and what they cost. They are simulated again before they are an answer: a model whose
plain step is the same and that runs otherwise under a plan is searched anew.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Callable

from recoup.cost.model import PricedTrace
from recoup.ir.decision import Decision
from recoup.planner.incumbents import Candidate
from recoup.thresholds import MOST_REMEMBERED_ANSWERS


@functools.lru_cache(maxsize=1)
def _plans() -> collections.OrderedDict[str, Candidate]:
    """Returns the plans found in this process, the most recent last."""
    return collections.OrderedDict()


def step_key(priced: PricedTrace, *settings: object) -> str:
    """Returns the key of a search: a hash of the step's trace, its prices and the settings that decide."""
    trace = priced.trace
    parts = (trace.fingerprint, trace.signatures, trace.ops, trace.storages, trace.calls)
    prices = (priced.op_seconds, priced.op_workspace_bytes, priced.host_costs, priced.source)
    return hashlib.sha256(repr((parts, prices, settings)).encode()).hexdigest()


def recall(
    key: str, simulate: Callable[[tuple[Decision, ...]], Candidate], search: Callable[[], Candidate | None]
) -> Candidate | None:
    """Returns the answer of a search made before if its simulation says the same now, else what `search` finds."""
    plans = _plans()
    known = plans.get(key)
    if known is not None and simulate(known.decisions) == known:
        return known
    found = search()
    if found is not None:
        plans[key] = found
        while len(plans) > MOST_REMEMBERED_ANSWERS:
            plans.popitem(last=False)
    return found
