"""One offline HTML page on a planned JAX step: the plan, the kept arrays, and how often ops run."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from recoup.ir.report import MOST_ROWS
from recoup.jax.cost import costs_for
from recoup.jax.evidence import JaxEvidence
from recoup.jax.inspection import Residual, op_counts_of, residuals_of
from recoup.jax.jax_plan import JaxPlan
from recoup.jax.planner import Planner
from recoup.jax.text import format_evidence, format_plan
from recoup.jax.trace import on_one_device, trace
from recoup.jax.writing import check_fingerprint
from recoup.report import svg
from recoup.units import byte_unit, format_bytes

_STYLE = """:root{color-scheme:light dark;--ink:light-dark(#1b1b1f,#e6e6ea);--dim:light-dark(#6b6b76,#9a9aa6);
--plain:light-dark(#c2570c,#f0a05a);--planned:light-dark(#1d5fbf,#7ab0ff);--line:light-dark(#ddd,#444)}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);max-width:62rem;margin:2rem auto;padding:0 1rem}
pre{white-space:pre-wrap;font-size:13px}table{border-collapse:collapse;font-size:13px;width:100%}
td,th{text-align:left;padding:.15rem .6rem .15rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}svg{width:100%;height:auto}
svg text{fill:var(--dim);font-size:12px}.grid,.axis{stroke:var(--line);fill:none}.plain{stroke:var(--plain)}
.planned{stroke:var(--planned)}.plain,.planned{fill:none;stroke-width:1.6}.wide{overflow-x:auto}"""


def format_html(
    step: Callable[..., Any],
    *args: Any,
    plan: JaxPlan,
    evidence: JaxEvidence | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> str:
    """Returns the page; nothing on it comes from elsewhere.

    Args:
        step: the loss function, not planned. *args, argnums, has_aux: as for `recoup.jax.plan`. plan: made for it.
        evidence: what `verify` returned; with it the page shows what the compiler keeps beside what is planned.

    Raises:
        PlanMismatch: if the plan was made for another step.

    Example:
        >>> made = recoup.jax.plan(loss, x, budget="100%")
        >>> recoup.jax.format_html(loss, x, plan=made)[:15]
        '<!doctype html>'
    """
    traced = trace(step, args, argnums, has_aux=has_aux)
    check_fingerprint(traced, plan)
    local = on_one_device(step, args, argnums, has_aux=has_aux, traced=traced)
    planner = Planner(local, costs_for(None), whole=traced)
    planned = planner.price(plan.segments)
    parts = [
        f"<h1>{escape(plan.step_name)}</h1><pre>{escape(format_plan(plan))}</pre>",
        "<h2>Temporaries through the step, simulated on the jaxpr</h2>",
        _timelines(planner.plain.memory.timeline, planned.memory.timeline),
    ]
    if evidence is not None:
        parts.append(f"<h2>Measured</h2><pre>{escape(format_evidence(evidence))}</pre>")
    parts += _residuals("Kept for backward, as planned", residuals_of(local, plan.segments))
    if evidence is not None:
        parts += _residuals(f"Kept for backward by the compiler ({evidence.compiler})", evidence.compiled_residuals)
    parts += _residuals("Kept for backward without a plan", residuals_of(local, planner.plain.layout))
    parts.append("<h2>Ops of loss and gradients</h2>")
    with_plan, without = (dict(op_counts_of(local, c.layout)) for c in (planned, planner.plain))
    names = sorted({*with_plan, *without}, key=lambda n: (-with_plan.get(n, 0), n))
    rows = [(n, str(without.get(n, 0)), str(with_plan.get(n, 0))) for n in names]
    parts.append(_table(("op", "without", "with the plan"), rows, numbers=(1, 2)))
    title = f"recoup: {escape(plan.step_name)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</html>\n"
    )


def _timelines(plain: Sequence[int], planned: Sequence[int]) -> str:
    """Returns both curves of bytes, each over its own ops."""
    most = max(*plain, *planned, 1)
    frame = svg.Frame(width=900, height=260, x_max=1.0, y_max=float(most))
    unit, name = byte_unit(most)
    drawn = [svg.axes(frame, x_unit=(1.0, ""), y_unit=(unit, name), x_name="share of the ops", y_name=name)]
    for kind, values in (("plain", plain), ("planned", planned)):
        xs = [i / max(len(values), 1) for i in range(len(values))]
        drawn.append(f'<path class="{kind}" d="{svg.steps(frame, xs, values, end=1.0)}"><title>{kind}</title></path>')
    names = ("plain", "without"), ("planned", "with the plan")
    legend = ", ".join(f'<span style="color:var(--{kind})">{words}</span>' for kind, words in names)
    return f'<svg viewBox="0 0 900 260" role="img">{"".join(drawn)}</svg><p>{legend}</p>'


def _residuals(title: str, found: Sequence[Residual]) -> Iterator[str]:
    """Yields a heading and a table, equal values in one row."""
    groups = collections.Counter(found)
    order = sorted(groups, key=lambda r: (-r.nbytes * groups[r], r.op, r.shape))
    total = sum(r.nbytes for r in found)
    yield f"<h2>{escape(title)}: {format_bytes(total)} in {len(found)} values</h2>"
    rows = [
        (format_bytes(r.nbytes * groups[r]), str(groups[r]), r.shape, r.op, r.name, r.source) for r in order[:MOST_ROWS]
    ]
    if len(order) > MOST_ROWS:
        rest = sum(r.nbytes * groups[r] for r in order[MOST_ROWS:])
        rows.append((format_bytes(rest), "", f"{len(order) - MOST_ROWS} more", "", "", ""))
    yield _table(("bytes", "times", "shape", "op", "name", "line"), rows, numbers=(0, 1))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if i in numbers else ''}>{escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
