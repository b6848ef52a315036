"""Which call makes the logits, and into how many tiles they should go: from a trace's bytes."""

from __future__ import annotations

import dataclasses

import numpy as np

from recoup.ir.trace import Trace
from recoup.solver.tiles import FEWEST_ROWS
from recoup.thresholds import MOST_TRIES, NEGLIGIBLE_SHARE, SAME_SHARE

_SCORES = ("aten._log_softmax.", "aten._softmax.", "aten.logsumexp.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadCall:
    """A call that may be the head of a language model.

    Attributes:
        output_bytes: of its logits.
        tokens: their rows.
        token_bytes: what a row takes in a tile.
    """

    path: str
    output_bytes: int
    tokens: int
    token_bytes: int

    def tile_tokens(self, tile_bytes: int) -> int:
        """Returns how many tokens make a tile of so many bytes: at least 64, and tiles of about equal size."""
        most = max(tile_bytes // self.token_bytes, min(FEWEST_ROWS, self.tokens), 1)
        num_tiles = -(-self.tokens // most)
        return -(-self.tokens // num_tiles)


def heads(trace: Trace, *, peak_bytes: int) -> list[HeadCall]:
    """Returns the Linear calls with the largest outputs, the largest first, each path once.

    Args:
        trace: of the plain step.
        peak_bytes: of the plain step.
    """
    found: dict[str, HeadCall] = {}
    scored = {_classes(trace, op.signature) for op in trace.ops if op.phase in ("forward", "loss")}
    for call in trace.calls:
        if call.runs_once or call.kind != "Linear" or call.children or call.index or len(call.outputs) != 1:
            continue
        nbytes = trace.storages[call.outputs[0]].nbytes
        rows = _rows(trace, call.first_op, call.last_op)
        if nbytes < NEGLIGIBLE_SHARE * peak_bytes or not rows:
            continue
        classes, itemsize = rows
        wide_bytes = np.dtype(np.float32).itemsize  # in which the loss is taken
        tokens = nbytes // (classes * itemsize)
        token_bytes = classes * (itemsize + (wide_bytes if itemsize < wide_bytes else 0))
        if tokens > 1 and classes in scored:
            found[call.path] = HeadCall(path=call.path, output_bytes=nbytes, tokens=tokens, token_bytes=token_bytes)
    return sorted(found.values(), key=lambda h: -h.output_bytes)[:MOST_TRIES]


def _classes(trace: Trace, signature: int) -> int:
    """Returns the number of classes of an op's log-softmax or its sum, 0 for other ops."""
    found = trace.signatures[signature]
    return int(found.args[0].shape[-1]) if found.name.startswith(_SCORES) else 0


def _rows(trace: Trace, first: int, last: int) -> tuple[int, int] | None:
    """Returns the classes and the bytes of one logit of the call's matmul, None if it has none."""
    for op in trace.ops[first:last]:
        signature = trace.signatures[op.signature]
        if signature.name.split(".")[1] in ("mm", "addmm") and signature.output_bytes:
            weight = signature.args[-1]
            return int(weight.shape[1]), {"float64": 8, "float32": 4}.get(weight.dtype, 2)
    return None


def loss_rows(trace: Trace, *, peak_bytes: int) -> int:
    """Returns how many rows a loss of the model's own forward should take at a time; 0: its logits are few, or none.

    A multiple of 64: such rows begin where kernels that load vectors want them, whatever their dtype and width.

    Args:
        trace: of the plain step.
        peak_bytes: of the plain step.
    """
    found = 0
    for op in trace.ops[: trace.num_forward_ops]:
        signature = trace.signatures[op.signature]
        if op.phase != "forward" or not signature.name.startswith(_SCORES[0]):
            continue
        shape = signature.args[0].shape
        if len(shape) != 2 or signature.output_bytes < NEGLIGIBLE_SHARE * peak_bytes:
            continue
        row_bytes = signature.output_bytes // shape[0]
        rows = max(int(peak_bytes * NEGLIGIBLE_SHARE) // row_bytes // FEWEST_ROWS, 1) * FEWEST_ROWS
        if rows < shape[0]:
            found = max(found, rows)
    return found


def tile_bytes(peak_bytes: int) -> int:
    """Returns the default bytes of a tile: a small share of the plain step's peak."""
    return int(peak_bytes * SAME_SHARE)
