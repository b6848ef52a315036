"""Simulates a step under decisions: applies them, captures the step under fake tensors, prices it.

This is the judge of every plan: the engine itself runs, only without data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from recoup import progress
from recoup.capture.capture import capture, try_capture
from recoup.capture.draws import EXTREMES, SEEDED, Draw, Words
from recoup.capture.spec import StepSpec
from recoup.capture.watched_step import FailedUnderPlan
from recoup.cost.card_memory import CardEvents, CardMemory, CardNeed, CardSize, uses_cublas
from recoup.cost.devices import CUBLASLT_BYTES
from recoup.cost.flops import product_flops
from recoup.cost.hidden_memory import hidden_blocks
from recoup.cost.host_link import Link, with_copies
from recoup.cost.host_overhead import device_seconds, step_seconds
from recoup.cost.model import CostModel, PricedTrace
from recoup.cost.roofline import RooflineCost
from recoup.errors import ReplayError, StepError, UsageError
from recoup.ir.decision import Decision, LossInPlace, Rederive
from recoup.ir.labels import group_labels
from recoup.ir.trace import Signature, Trace
from recoup.planner.incumbents import Candidate
from recoup.runtime import scan_bytes
from recoup.runtime.apply import apply_decisions
from recoup.runtime.hooks import HOOKS, Hook
from recoup.runtime.tile.module.tiled import Proofs
from recoup.solver.lm_head import loss_rows

EVERYWHERE = (Rederive(path=""),)


class Simulator:
    """Simulates candidates for one step on one device, once each.

    Attributes:
        plain: the step without a plan.
        priced: its trace.
        simulated: what was simulated so far, by decisions.
        num_simulated_ops: ops of all steps simulated so far: the work that searches are limited by.
        fixed_bytes: what the device takes whatever the step does (library workspaces).
        hooks: how decisions of each class change a call.
        failures: why steps did not run, by the actions of their decisions; of regions none is noted.
        card: what steps take from the allocator of a card; None where they run on a CPU.
        link: to the host, if something may be moved there.
        num_draws: of random numbers that were tried for the largest step.
        num_calls: of each module path.
        takes_loss_in_place: whether plans may have the model's losses in place.
        mutated_buffers: of each path, those that regions are told of.
    """

    def __init__(
        self,
        spec: StepSpec,
        *,
        cost: CostModel,
        fixed_bytes: int = 0,
        link: Link | None = None,
        hooks: Mapping[type[Decision], Hook] = HOOKS,
    ) -> None:
        self.cost = cost
        self.fixed_bytes = fixed_bytes
        self.link = link
        self.hooks = hooks
        self.simulated: dict[tuple[Decision, ...], Candidate] = {}
        self.failures: dict[str, str] = {}
        self.takes_loss_in_place = False
        self._card_steps: dict[tuple[Decision, ...], tuple[CardEvents, CardNeed]] = {}
        self._proofs = Proofs()
        self.num_simulated_ops = 0
        progress.advance("capturing the step")
        self.spec, trace, counts, self.num_draws = _largest_draw(spec)
        progress.advance(f"pricing {len(trace.signatures)} distinct ops")
        self.priced = _with_counts(cost.price(trace), counts)
        if not uses_cublas(trace):
            self.fixed_bytes = 0
        self._optimizer = self._optimizer_step()
        self.mutated_buffers = {c.path: c.mutated_buffers for c in trace.calls}
        self.num_calls: dict[str, int] = {}
        for call in trace.calls:
            self.num_calls[call.path] = max(self.num_calls.get(call.path, 0), call.index + 1)
        self.card = self._card_memory() if spec.dialect == "cuda" else None
        self.plain = self.candidate((), self.priced)

    @property
    def trace(self) -> Trace:
        """The trace of the plain step."""
        return self.priced.trace

    @functools.cached_property
    def base(self) -> tuple[tuple[Decision, ...], PricedTrace]:
        """What every plan may have besides, nothing where it is not wanted or of no use, and the step with it."""
        rows = loss_rows(self.trace, peak_bytes=self.plain.peak_bytes) if self.takes_loss_in_place else 0
        if rows and self.trace.source == "fake":
            chosen = (LossInPlace(path="", rows=rows),)
            try:
                priced = self.simulate_priced(chosen)
            except (ReplayError, UsageError):  # the step writes over its logits, or differentiates them twice
                return (), self.priced
            if any(s.name == "aten._log_softmax_backward_data.out" for s in priced.trace.signatures):
                self.note(chosen, priced)
                return chosen, priced
        return (), self.priced

    def simulate_priced(self, chosen: tuple[Decision, ...]) -> PricedTrace:
        """Returns the step with `chosen` applied, captured and priced; without the optimizer's part."""
        self.spec.known_state.note(self.spec.model, self.spec.batch, self.spec.objective.functions)
        applied = apply_decisions(self.spec.model, chosen, hooks=self.hooks, proofs=self._proofs)
        with applied, scan_bytes.counting() as counts:
            priced = self.cost.price(capture(self.spec, known=self.trace))
        priced = _with_counts(priced, counts)
        return priced if self.link is None else with_copies(priced, self.link)

    def simulate(self, chosen: tuple[Decision, ...]) -> Candidate:
        """Runs the step with `chosen` applied under fake tensors and returns its cost.

        Decisions under which the step does not run are no plan: their candidate is larger than any, and is not kept.
        """
        if not chosen:
            return self.plain
        found = self.simulated.get(chosen)
        if found is None:
            progress.advance(f"simulating a plan with {len(chosen)} decisions")
            try:
                found = self.note(chosen, self.simulate_priced(chosen))
            except StepError as error:  # as of a span that begins outside of a user's checkpoint and ends inside
                if not any(d.is_region for d in chosen):
                    if not isinstance(error, FailedUnderPlan):
                        raise
                    self.failures[", ".join(dict.fromkeys(d.action for d in chosen))] = str(error)
                found = dataclasses.replace(self.plain, decisions=chosen, peak_bytes=2 * self.plain.peak_bytes)
        return found

    def note(self, chosen: tuple[Decision, ...], priced: PricedTrace) -> Candidate:
        """Stores and returns the candidate of a step that was captured and priced with `chosen`."""
        found = self.simulated[chosen] = self.candidate(chosen, priced)
        self.num_simulated_ops += len(priced.trace.ops)
        return found

    def _card_memory(self) -> CardMemory:
        table = self.cost if isinstance(self.cost, RooflineCost) else None

        def hidden(signature: Signature, nbytes: int) -> tuple[Sequence[int], Sequence[int]]:
            if table is None:
                return (), (nbytes,)
            return hidden_blocks(signature, table.device, in_order=table.flags.is_in_order)

        workspace = self.priced.op_workspace_bytes
        return CardMemory(
            self.trace, workspace, hidden=hidden, thread_bytes=max(self.fixed_bytes - CUBLASLT_BYTES, 0) // 2
        )

    def card_size(self, chosen: tuple[Decision, ...]) -> CardSize:
        """Returns the smallest card that the step with `chosen` applied runs on."""
        assert self.card is not None
        if chosen not in self._card_steps:
            self._note_card(chosen, self.simulate_priced(chosen))
        return self.card.size(*self._card_steps[chosen], reserves=bool(chosen))

    def _note_card(self, chosen: tuple[Decision, ...], priced: PricedTrace) -> CardNeed:
        """Returns what a captured and priced step with `chosen` needs of a card that has plenty."""
        assert self.card is not None
        events = self.card.events(priced.trace, priced.op_workspace_bytes)
        need = self.card.need(events)
        self._card_steps[chosen] = events, need
        return need

    def _optimizer_step(self) -> tuple[int, float]:
        """Returns the peak and the seconds of the optimizer's step, which no plan changes."""
        trace, priced = self.priced.trace, self.priced
        at = [i for i, o in enumerate(trace.ops) if o.phase == "optimizer"]
        levels = trace.levels(priced.op_workspace_bytes)
        seconds = sum(priced.op_seconds[i] for i in at)
        if self.link is not None:  # a bucket of state comes in, is updated and goes out before the next
            seconds += trace.optimizer_host_bytes * (1 / self.link.back_bytes + 1 / self.link.out_bytes)
        return max((levels[i] for i in at), default=0), seconds

    def candidate(self, chosen: tuple[Decision, ...], priced: PricedTrace) -> Candidate:
        """Returns the candidate of a captured and priced step with `chosen`."""
        trace = priced.trace
        levels = trace.levels(priced.op_workspace_bytes)
        at = max(range(len(levels)), key=levels.__getitem__)
        op = trace.ops[at]
        alive = sorted(
            (s for s in trace.storages if s.alloc_op <= at <= s.free_op), key=lambda s: s.nbytes, reverse=True
        )
        tensors = group_labels([(s.label, s.nbytes) for s in alive])
        if priced.op_workspace_bytes[at]:
            name = trace.signatures[op.signature].name
            tensors = [*tensors, (f"workspace of {name}", priced.op_workspace_bytes[at])]
            tensors.sort(key=lambda item: -item[1])
        phase = "replay" if op.replayed else op.phase
        peak_bytes = filled_bytes = levels[at] + self.fixed_bytes
        if self._optimizer[0] + self.fixed_bytes > peak_bytes:
            peak_bytes = filled_bytes = self._optimizer[0] + self.fixed_bytes
            phase = "optimizer"
        if self.card is not None:
            peak_bytes = self._note_card(chosen, priced).allocated_bytes
        seconds = step_seconds(chosen, priced, plain=self.trace)
        model_end = sum(1 for o in trace.ops if o.phase == "forward")
        held = trace.held_storages()
        products = product_flops(trace.signatures)
        begin = trace.num_forward_ops  # a tiled head saves its weight's gradient, which is no "saved" storage
        in_forward = (s for s in trace.storages if s.saved_ops and min(s.saved_ops) < model_end)
        of_model = (s for s in in_forward if s.alloc_op < begin <= s.free_op)
        saved = [s for s in of_model if s.alloc_op >= 0 or s.category in ("saved", "outside")]
        beside = (s for s in trace.storages if not s.saved_ops and 0 <= s.alloc_op < model_end and begin <= s.free_op)
        return Candidate(
            decisions=chosen,
            peak_bytes=peak_bytes,
            card_excess_bytes=peak_bytes - filled_bytes,
            step_seconds=seconds + self._optimizer[1] + priced.copy_seconds,
            host_seconds=seconds - device_seconds(chosen, priced),
            flops=sum(trace.signatures[o.signature].flops for o in trace.ops),
            recomputed_flops=sum(trace.signatures[o.signature].flops for o in trace.ops if o.replayed),
            saved_bytes=sum(s.nbytes for s in held),
            forward_saved_bytes=sum(s.nbytes for s in saved),
            held_bytes=sum(s.nbytes for s in beside),
            phase=phase,
            tensors=tuple(tensors[:8]),
            offloaded_bytes=sum(c.nbytes for c in trace.copies if c.kind == "out"),
            host_bytes=trace.host_peak_bytes(),
            num_collectives=trace.num_collectives,
            num_scan_evaluations=priced.num_scan_evaluations,
            product_flops=sum(products[o.signature] for o in trace.ops),
        )


def _largest_draw(spec: StepSpec) -> tuple[StepSpec, Trace, scan_bytes.ScanCounts, int]:
    """Returns the step under the random draw with the largest peak, its trace, its scans, and the number of draws."""
    with scan_bytes.counting() as counts:
        trace = capture(spec)
    found = [(spec, trace, counts)]
    if any(trace.draws_on_host) and trace.source == "fake" and spec.draw == Draw.AS_IT_IS:
        progress.advance("the step draws random numbers: trying more draws")
        words = Words(*trace.draws_on_host)
        for draws in (EXTREMES, SEEDED):
            for draw in draws:
                one = dataclasses.replace(spec, draw=draw, draw_words=words)
                with scan_bytes.counting() as counts:
                    tried = try_capture(one)
                if tried is not None:
                    found.append((one, tried, counts))
            if len({_highest(trace) for _, trace, _ in found}) == 1:
                break
    largest, trace, counts = max(found, key=lambda one: _highest(one[1]))
    return largest, trace, counts, len(found)


def _highest(trace: Trace) -> int:
    return max(trace.levels(), default=0)


def _with_counts(priced: PricedTrace, counts: scan_bytes.ScanCounts) -> PricedTrace:
    """Returns the priced step with the counts of its scans."""
    return dataclasses.replace(
        priced,
        num_scan_evaluations=counts.num_evaluations,
        num_scan_tapes=counts.num_tapes,
        num_scan_replayed=counts.num_replayed,
    )
