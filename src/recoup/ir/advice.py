"""When recomputing cannot help, and what would: sentences from a profile's numbers."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from recoup.units import format_bytes

if TYPE_CHECKING:
    from recoup.ir.profile import Profile, ProfileRow

_LARGE_SHARE = 0.2  # of the peak: one thing that takes more is worth a sentence
_HEAD = re.compile(r"log_softmax|cross_entropy|nll_loss|\blm_head\b|\bhead\b| in loss\b|\blogits\b")
_STATIC = ("parameter", "buffer", "optimizer", "gradient", "batch")
_INSTEAD = {
    "optimizer": "an optimizer with less state (Adafactor, SGD, 8-bit states), or state sharded (FSDP) or offloaded",
    "parameter": "weights in a smaller dtype, adapters on frozen weights (LoRA), or sharding (FSDP)",
    "gradient": "gradients in a smaller dtype, an optimizer step inside backward, or sharding (FSDP)",
    "batch": "a smaller batch, or one that is loaded in parts",
    "temporary": "a smaller batch, or kernels that need less workspace",
    "buffer": "smaller buffers",
    "library": "nothing in the step: it is what libraries (cuBLAS) keep on a GPU, and little beside a larger model",
}


def advise(profile: Profile) -> list[str]:
    """Returns sentences: the bytes that recomputing can free, those that it cannot, and which action would."""
    at_peak = dict(profile.at_peak)
    peak = profile.peak_bytes
    saved = at_peak.get("saved", 0)
    static = sum(at_peak.get(category, 0) for category in _STATIC)
    sentences = []
    if saved < _LARGE_SHARE * peak:
        others = {c: size for c, size in at_peak.items() if c != "saved"}
        largest = max(others, key=lambda c: others[c]) if others else "temporary"
        sentences.append(
            f"Recomputing cannot help much: {format_bytes(saved)} of the {format_bytes(peak)} at the peak is held for "
            f"backward. Most is {largest} ({format_bytes(others.get(largest, 0))}). What would: {_INSTEAD[largest]}."
        )
    else:
        sentences.append(
            f"Up to {format_bytes(saved)} of the {format_bytes(peak)} at the peak is held for backward and can be "
            f"rederived or recomputed; {format_bytes(static)} is there whatever the plan."
        )
    head = sum(size for label, size in profile.tensors if _HEAD.search(label) and not label.startswith("gradient of"))
    if head > _LARGE_SHARE * peak:
        sentences.append(
            f"Logits and loss hold {format_bytes(head)} of it. They are at the end of the forward, where running them "
            "again frees nothing: compute the loss over tiles of tokens, or use fewer tokens or a smaller vocabulary."
        )
    giant = _giant(profile)
    if giant is not None and giant.saved_bytes > _LARGE_SHARE * peak:
        sentences.append(
            f"One call, `{giant.path or profile.model_class}` ({giant.kind}), saves {format_bytes(giant.saved_bytes)} "
            "by itself. As a region it holds all of that again while it is replayed: split it into modules, run it "
            "over parts of its input, or use a smaller batch."
        )
    if static > 0.6 * peak and saved >= _LARGE_SHARE * peak:
        largest = max(_STATIC, key=lambda c: at_peak.get(c, 0))
        sentences.append(
            f"{largest.capitalize()} memory is {format_bytes(at_peak[largest])} by itself. What would lower it: "
            f"{_INSTEAD[largest]}."
        )
    return sentences


def _giant(profile: Profile) -> ProfileRow | None:
    """Returns the call that saves the most by its own ops, not by its children's; None where calls share it out."""
    own = [row.saved_bytes for row in profile.rows]
    parents: list[int] = []
    for i, row in enumerate(profile.rows):
        del parents[row.depth :]
        if parents:
            own[parents[-1]] -= row.saved_bytes
        parents.append(i)
    if not own:
        return None
    at = max(range(len(own)), key=own.__getitem__)
    return (
        dataclasses.replace(profile.rows[at], saved_bytes=own[at])
        if own[at] > 0.5 * max(profile.saved_bytes, 1)
        else None
    )
