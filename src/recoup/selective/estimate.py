"""Activation memory of LLaMA-7B over sequence and batch: two formulas from textbooks beside the true saved bytes.

Formulas, in values of `value_bytes` each (s tokens, b examples, d width, h heads, f feed-forward width, L layers):

- textbook, a layer: 3 s b d (Q, K, V) + s^2 b h (attention weights) + s b d (attention output) + s b f + 2 s b d
  (norms); times L, or with checkpointing times L/k + k, k = floor(sqrt(L));
- rule of thumb, a layer: 12 s b d.

True bytes: what autograd holds when backward begins, by a captured step of the transformers model as CUDA counts it
(SDPA; the tensors' bytes, not rounded up to allocator blocks). They are linear in the layers (which are alike), in the
tokens and in the examples, so ten small captures give every cell; `check_cell` captures the whole model at one size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from recoup import progress
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.errors import InternalError, UsageError
from recoup.ir.decision import Decision, Recompute, Rederive
from recoup.ir.trace import Trace
from recoup.runtime.apply import apply_decisions
from recoup.selective.config import CheckpointConfig
from recoup.selective.strategies import choose
from recoup.targets.resolve import resolve_target
from recoup.units import GIB

SEQUENCES = (512, 1024, 2048, 4096, 8192)
BATCHES = (1, 4, 8)
_CORNER_SEQUENCES = (512, 1024)
_CORNER_BATCHES = (2, 3)
_Corners = dict[tuple[int, int, int], dict[str, int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer's sizes; the defaults are LLaMA-7B's (Touvron et al., arXiv 2302.13971)."""

    num_layers: int = 32
    width: int = 4096
    num_heads: int = 32
    feed_forward: int = 11008
    vocabulary: int = 32000
    value_bytes: int = 2


MODELS = {"llama-7b": Shape()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One cell of the table, all in bytes held when backward begins.

    Attributes:
        textbook: by the textbook formula.
        rule_of_thumb: by the rule of thumb.
        textbook_sqrt: by the textbook formula with sqrt checkpointing.
        plain: captured, without a plan.
        rederived: captured, with rederive everywhere.
        every_block: captured, with every block a region.
        sqrt: captured, with sqrt checkpointing.
        planned: captured, with every block a region and the rest rederived.
    """

    sequence: int
    batch: int
    textbook: int
    rule_of_thumb: int
    textbook_sqrt: int
    plain: int
    rederived: int
    sqrt: int
    every_block: int
    planned: int

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return dataclasses.asdict(self)


def textbook_bytes(shape: Shape, sequence: int, batch: int, *, layers: float | None = None) -> int:
    """Returns the textbook's activation bytes of `layers` layers (left out: all)."""
    s, b, d = sequence, batch, shape.width
    values = 3 * s * b * d + s * s * b * shape.num_heads + s * b * d + s * b * shape.feed_forward + 2 * s * b * d
    return int(values * shape.value_bytes * (shape.num_layers if layers is None else layers))


def rule_of_thumb_bytes(shape: Shape, sequence: int, batch: int) -> int:
    """Returns 12 s b d values a layer in bytes."""
    return 12 * sequence * batch * shape.width * shape.num_layers * shape.value_bytes


def estimate(name: str, *, sequences: Sequence[int] = SEQUENCES, batches: Sequence[int] = BATCHES) -> list[Estimate]:
    """Returns the table for a model of `MODELS`.

    Raises:
        UsageError: for an unknown name.
        TargetError: if transformers is missing.
    """
    shape = find_shape(name)
    corners = {}
    for layers in (1, 2):
        for sequence in _CORNER_SEQUENCES:
            for batch in (1, *_CORNER_BATCHES) if layers == 1 else _CORNER_BATCHES:
                progress.advance(f"capturing {layers} layers, {sequence} tokens x {batch}")
                corners[layers, sequence, batch] = _captures(shape, layers, sequence, batch)
    return [_cell(shape, corners, s, b) for s in sequences for b in batches]


def find_shape(name: str) -> Shape:
    """Returns the sizes of a model of `MODELS`; raises UsageError if there is none of that name."""
    if name not in MODELS:
        raise UsageError(f"Unknown model {name!r}. Known: {', '.join(MODELS)}; for others use `recoup profile TARGET`.")
    return MODELS[name]


def _cell(shape: Shape, corners: _Corners, sequence: int, batch: int) -> Estimate:
    one, two = (_extended(corners, n, sequence, batch) for n in (1, 2))
    layers, k = shape.num_layers, math.floor(math.sqrt(shape.num_layers))

    def grown(kind: str) -> int:
        """With every layer the same: linear in their number."""
        return one[kind] + (layers - 1) * (two[kind] - one[kind])

    per_layer, per_region = two["plain"] - one["plain"], two["every_block"] - one["every_block"]
    kept, regions = _sqrt_shape(layers)
    return Estimate(
        sequence=sequence,
        batch=batch,
        textbook=textbook_bytes(shape, sequence, batch),
        rule_of_thumb=rule_of_thumb_bytes(shape, sequence, batch),
        textbook_sqrt=textbook_bytes(shape, sequence, batch, layers=layers / k + k),
        plain=grown("plain"),
        rederived=grown("rederived"),
        sqrt=one["every_block"] + (regions - 1) * per_region + kept * per_layer,
        every_block=grown("every_block"),
        planned=grown("planned"),
    )


def _extended(corners: _Corners, num_layers: int, sequence: int, batch: int) -> dict[str, int]:
    """Returns saved bytes by kind at another size: linear in the tokens of an example and in two or more examples.

    One example saves 8 bytes differently (its shifted labels are a view), so those captures are its own.
    """
    if batch == 1 and num_layers > 1:
        one, more, less = (_extended(corners, 1, sequence, 1), *(_linear(corners, n, sequence, 1) for n in (2, 1)))
        return {kind: one[kind] + more[kind] - less[kind] for kind in one}
    return _linear(corners, num_layers, sequence, batch, own=batch == 1)


def _linear(corners: _Corners, num_layers: int, sequence: int, batch: int, *, own: bool = False) -> dict[str, int]:
    (s0, s1), (b0, b1) = _CORNER_SEQUENCES, (1, 2) if own else _CORNER_BATCHES
    found = {}
    for kind in corners[num_layers, s0, b0]:
        low, high = (
            corners[num_layers, s, b0][kind]
            + (batch - b0) * (corners[num_layers, s, b1][kind] - corners[num_layers, s, b0][kind]) // (b1 - b0)
            for s in (s0, s1)
        )
        found[kind] = low + (sequence - s0) * (high - low) // (s1 - s0)
    return found


def _sqrt_shape(num_layers: int) -> tuple[int, int]:
    """Returns how many layers strategy "sequential" keeps whole, and how many regions it makes."""
    wanted = max(1, round(math.sqrt(num_layers)))
    bounds = [round(i * num_layers / wanted) for i in range(wanted + 1)]
    return bounds[-1] - bounds[-2], wanted - 1


def _captures(shape: Shape, num_layers: int, sequence: int, batch: int) -> dict[str, int]:
    """Returns saved bytes by kind, of a model with that many layers."""
    spec = _spec(shape, num_layers, sequence, batch)
    trace = capture(spec)
    regions = [Recompute(path=f"model.layers.{i}") for i in range(num_layers)]
    rederive = Rederive(path="")
    kinds: dict[str, Sequence[Decision]] = {
        "rederived": [rederive],
        "every_block": regions,
        "planned": [rederive, *(dataclasses.replace(d, inside="rederive") for d in regions)],
    }
    return {"plain": trace.held_bytes, **{kind: _saved_with(spec, trace, ds) for kind, ds in kinds.items()}}


def _saved_with(spec: StepSpec, trace: Trace, decisions: Sequence[Decision]) -> int:
    with apply_decisions(spec.model, decisions):
        return capture(spec, known=trace).held_bytes


def captured_bytes(name: str, sequence: int, batch: int) -> dict[str, int]:
    """Returns saved bytes of the whole model, captured: "plain" and "sqrt"."""
    shape = find_shape(name)
    progress.advance(f"capturing all {shape.num_layers} layers, {sequence} tokens x {batch}")
    spec = _spec(shape, shape.num_layers, sequence, batch)
    trace = capture(spec)
    chosen = choose(CheckpointConfig(strategy="sequential"), spec.model, None)
    return {"plain": trace.held_bytes, "sqrt": _saved_with(spec, trace, chosen.decisions)}


def check_cell(name: str, cell: Estimate) -> str:
    """Captures the whole model at a cell's size and returns the sentence that says they agree.

    Raises:
        InternalError: if they do not, to the byte.
    """
    found = captured_bytes(name, cell.sequence, cell.batch)
    for kind, size in found.items():
        if size != getattr(cell, kind):
            raise InternalError(
                f"The table's {kind} of {cell.sequence} tokens x {cell.batch} is {getattr(cell, kind)} bytes, a "
                f"captured step of the whole {name} holds {size}. They are not linear here."
            )
    return (
        f"checked: all layers captured at {cell.sequence} tokens x {cell.batch} hold {found['plain']} bytes plain and "
        f"{found['sqrt']} with sqrt(n), as the table says"
    )


def _spec(shape: Shape, num_layers: int, sequence: int, batch: int) -> StepSpec:
    text = (
        f"hf:llama?num_hidden_layers={num_layers}&hidden_size={shape.width}&intermediate_size={shape.feed_forward}"
        f"&num_attention_heads={shape.num_heads}&vocab_size={shape.vocabulary}&max_position_embeddings={sequence}"
    )
    dtype = {2: "bfloat16", 4: "float32"}[shape.value_bytes]
    found = resolve_target(text, batch=batch, seq=sequence, dtype=dtype, device="meta")
    model: nn.Module = found.model
    return StepSpec(model=model, batch=found.batch, dialect="cuda")


def format_estimates(name: str, cells: Sequence[Estimate], *, checked: str = "") -> str:
    """Returns the table in GiB, and by how much the formulas are off."""
    lines = [
        f"{name}: bytes held for backward, GiB; formulas on the left, captured steps on the right",
        f"{'tokens':>6} {'batch':>5} | {'textbook':>9} {'12 sbd':>8} {'sqrt(n)':>8} | {'true':>8} {'textbook off':>13} "
        f"{'sqrt(n)':>8} {'block':>7} {'rederive':>8} {'both':>7}",
    ]
    for c in cells:
        off = 100 * (c.textbook / c.plain - 1)
        lines.append(
            f"{c.sequence:6} {c.batch:5} | {c.textbook / GIB:9.2f} {c.rule_of_thumb / GIB:8.2f} "
            f"{c.textbook_sqrt / GIB:8.2f} | {c.plain / GIB:8.2f} {off:+12.0f}% {c.sqrt / GIB:8.2f} "
            f"{c.every_block / GIB:7.2f} {c.rederived / GIB:8.2f} {c.planned / GIB:7.2f}"
        )
    lines.append("textbook counts attention weights, which SDPA never stores, and one d_ff where SwiGLU stores several")
    lines.append("sqrt(n), block: regions of about sqrt(n) blocks (last kept), of one; both: block and rederive")
    if checked:
        lines.append(checked)
    return "\n".join(lines)
