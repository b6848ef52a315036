"""From a simulated candidate to the plan for people and for disk: its prediction, and sentences about it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recoup._pytree import iterate_tensors
from recoup.cost.card_memory import CardSize, uses_cudnn
from recoup.cost.roofline import RooflineCost
from recoup.ir.decision import Tile, TileModule
from recoup.ir.plan import Plan, Prediction
from recoup.ir.trace import TensorSpec, Trace
from recoup.planner.incumbents import Candidate
from recoup.planner.simulator import EVERYWHERE, Simulator
from recoup.planner.strategies.tile import is_tiled
from recoup.runtime.kv_cache import caching_paths
from recoup.runtime.seen_step import longest_dim
from recoup.units import format_bytes


def prediction_of(simulator: Simulator, candidate: Candidate, card: CardSize | None = None) -> Prediction:
    """Returns the prediction that a plan states."""
    plain = simulator.plain
    return Prediction(
        peak_bytes=candidate.peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        step_seconds=candidate.step_seconds,
        plain_step_seconds=plain.step_seconds,
        recomputed_flops=candidate.recomputed_flops,
        plain_flops=sum(simulator.trace.signatures[o.signature].flops for o in simulator.trace.ops),
        saved_bytes=candidate.saved_bytes,
        plain_saved_bytes=plain.saved_bytes,
        phase=candidate.phase,
        tensors=candidate.tensors,
        cost_source=simulator.priced.source,
        offloaded_bytes=candidate.offloaded_bytes,
        host_bytes=candidate.host_bytes,
        num_collectives=candidate.num_collectives,
        plain_num_collectives=plain.num_collectives,
        num_all_gathers=simulator.priced.num_all_gathers,
        num_scan_evaluations=candidate.num_scan_evaluations,
        forward_saved_bytes=candidate.forward_saved_bytes,
        held_bytes=candidate.held_bytes,
        batch_bytes=_model_input_bytes(simulator),
        optimizer_bytes=sum(s.nbytes for s in simulator.trace.storages if s.category == "optimizer"),
        gradient_bytes=sum(s.nbytes for s in simulator.trace.storages if s.category == "gradient" and s.alloc_op < 0),
        longest_dim=_longest_dim(simulator),
        precision=_precision(simulator.trace),
        is_later_step=simulator.spec.carried.differs,
        card_bytes=card.fresh_bytes if card else 0,
        resumed_card_bytes=card.resumed_bytes if card else 0,
        expandable_card_bytes=card.expandable_bytes if card else 0,
        room_bytes=card.room_bytes if card else 0,
    )


def _model_input_bytes(simulator: Simulator) -> int:
    """Returns the bytes of the model's inputs; 0 if the user's own step function makes them."""
    if simulator.spec.objective.step is not None:
        return 0
    return sum(s.nbytes for s in simulator.trace.storages if s.category == "batch")


def _longest_dim(simulator: Simulator) -> int:
    """Returns the largest dimension of the model's inputs; 0 if the user's own step function makes them."""
    if simulator.spec.objective.step is not None:
        return 0
    return longest_dim(iterate_tensors(simulator.spec.batch))


def _precision(trace: Trace) -> str:
    """Returns the dtype of the inputs of the op with the most FLOPs, "" if no op has any.

    An attention may compute in another one than the modules around it, whose dtypes are what the watch sees.
    """
    most = max(trace.signatures, key=lambda s: s.flops, default=None)
    specs = [a for a in most.args if isinstance(a, TensorSpec)] if most is not None and most.flops else []
    of_most = specs[0].dtype if specs else ""
    return of_most if of_most in trace.precisions else next(iter(trace.precisions), of_most)


def write_plan(
    simulator: Simulator,
    candidate: Candidate,
    *,
    budget_bytes: int,
    budget_text: str,
    device: str,
    card: CardSize | None = None,
    expandable: bool = False,
    more_notes: Sequence[str] = (),
) -> Plan:
    """Returns the plan for people and for disk.

    Args:
        card: the smallest card that the plan runs on; None where it runs on none.
        expandable: whether it runs with them.
    """
    from recoup import __version__

    modules = dict(simulator.spec.model.named_modules(remove_duplicate=False))
    paths = dict.fromkeys(p for d in candidate.decisions for p in d.paths)
    notes = list(simulator.trace.notes)
    if any(simulator.trace.draws_on_host):
        notes.append(
            "the step draws from python's or numpy's random numbers (are layers dropped at random?): this plan is for "
            f"the largest of {simulator.num_draws} draws that were tried; a training step that draws more passes the "
            "budget and says so (E302)"
        )
    if simulator.trace.source == "real":
        notes.append(f"captured from a real step: {simulator.trace.reason}")
    if not simulator.spec.model.training:
        notes.append("the model is in eval mode, and so is this plan: call model.train() first if it trains in that")
    if "no loss was given" in simulator.trace.grad_mode_default_loss:
        notes.append(f"the loss is {simulator.trace.grad_mode_default_loss}")
    if simulator.plain.peak_bytes <= budget_bytes and not candidate.decisions:
        notes.append("the unplanned step fits: nothing is changed")
    if caching_paths(modules, [d.path for d in candidate.decisions if d.is_region]):
        notes.append("the key-value cache is off while this plan trains (use_cache); evaluation keeps it")
    notes += _tile_notes(simulator, candidate)
    if card is not None:
        needed, lower = card.expandable_bytes if expandable else card.fresh_bytes, ""
        if expandable:
            lower = " by the expandable segments that are set here"
        else:
            if card.resumed_bytes > card.fresh_bytes:
                lower = f", {format_bytes(card.resumed_bytes)} where training resumes from a checkpoint"
            if card.expandable_bytes < card.fresh_bytes:
                lower += f"; {format_bytes(card.expandable_bytes)} with PYTORCH_ALLOC_CONF=expandable_segments:True"
        notes.append(
            f"torch reserves {format_bytes(needed)} of the card for this plan, blocks it cannot fill "
            f"included{lower}; "
            "the CUDA context comes on top"
        )
        if isinstance(simulator.cost, RooflineCost) and uses_cudnn(simulator.trace):
            notes.append(
                "what cuDNN takes while it runs (convolutions, batch norm, its attention) depends on what it chooses "
                "there and is not in these bytes: leave room for it, or plan on the card, where it is measured"
            )
    if candidate.offloaded_bytes and simulator.link is not None:
        notes.append(
            f"offload moves {format_bytes(candidate.offloaded_bytes)} out and back each step and holds up to "
            f"{format_bytes(candidate.host_bytes)} there; at "
            f"{simulator.link.out_bytes / 1e9:.3g} GB/s out and {simulator.link.back_bytes / 1e9:.3g} back "
            f"({simulator.link.source})"
        )
    notes += more_notes
    return Plan(
        decisions=candidate.decisions,
        budget_bytes=budget_bytes,
        budget_text=budget_text,
        device=device,
        model_class=simulator.trace.model_class,
        fingerprint=simulator.trace.fingerprint,
        structure=tuple((path, type(modules[path]).__name__) for path in paths),
        predicted=prediction_of(simulator, candidate, card),
        notes=tuple(notes),
        versions=(("recoup", __version__), ("torch", str(torch.__version__))),
    )


def _tile_notes(simulator: Simulator, candidate: Candidate) -> list[str]:
    """Returns notes on a tiled plan: the peak of each action by itself, and what tiles cost in exactness."""
    if not is_tiled(candidate.decisions):
        return []
    tile = tuple(d for d in candidate.decisions if isinstance(d, Tile))
    found = []
    if tile in simulator.simulated:
        found.append(f"tile alone peaks at {format_bytes(simulator.simulated[tile].peak_bytes)}")
    if EVERYWHERE in simulator.simulated:
        found.insert(0, f"rederive alone peaks at {format_bytes(simulator.simulated[EVERYWHERE].peak_bytes)}")
    both = simulator.simulated.get((*EVERYWHERE, *tile))
    if both is not None:
        found.append(f"both at {format_bytes(both.peak_bytes)}")
    alone = ", ".join(found)
    regions = sum(d.is_region for d in candidate.decisions)
    if regions and alone:
        alone += f"; {regions} regions recomputed give the rest, {format_bytes(candidate.peak_bytes)}"
    notes = [f"{alone} (plain {format_bytes(simulator.plain.peak_bytes)})"] if alone else []
    modules = sum(isinstance(d, TileModule) for d in tile)
    if modules:
        what = "1 module runs" if modules == 1 else f"{modules} modules run"
        notes.append(f"{what} over tiles: a forward again in backward, a tile at a time")
    return [*notes, "tile sums in another order: gradients are equal up to rounding, not bit for bit"]
