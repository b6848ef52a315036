"""Plans: decisions and their prediction; plain data, JSON, independent of torch."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recoup.errors import UsageError
from recoup.ir import html
from recoup.ir.decision import DECISIONS, Decision, Region, read_decision
from recoup.ir.fields import check_schema, read_fields, shown
from recoup.ir.text import format_decisions, format_percent, format_rows, format_share, width
from recoup.units import format_bytes, format_flops, format_seconds

SCHEMA = "recoup-plan/2"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted cost of the step, simulated.

    Attributes:
        peak_bytes: peak of the whole step, everything counted.
        plain_peak_bytes: the same without a plan.
        step_seconds: seconds of a step, by the cost source named in `cost_source`.
        plain_step_seconds: the same without a plan.
        extra_time_ratio: step_seconds / plain_step_seconds - 1.
        recomputed_flops: FLOPs run a second time.
        plain_flops: FLOPs of the step without a plan.
        saved_bytes: bytes that autograd holds when backward begins.
        plain_saved_bytes: the same without a plan.
        offloaded_bytes: bytes moved to the host in one step.
        host_bytes: the most bytes on the host at a time.
        num_collectives: collectives of one step on each rank, on distributed tensors (tensor parallel).
        plain_num_collectives: the same without a plan.
        num_scan_evaluations: step evaluations of the scans whose bytes the plan decides, forward and backward together.
        num_all_gathers: of the step on each rank, where it is sharded (`plan --fsdp`); with the plan as without.
        forward_saved_bytes: of saved_bytes, those of the model's own forward, without a loss outside of it, and what
            an earlier step left for it (a mask) and it saves.
        held_bytes: made in the model's forward, there when backward begins though autograd does not keep it.
        batch_bytes: of the batch in the step that was planned, 0 if its model was called with something else.
        optimizer_bytes: of the optimizer's state there.
        gradient_bytes: of gradients that are there when forward begins (accumulation).
        is_later_step: whether that step is not the first: what earlier ones leave (caches, a memory) has it run others.
        longest_dim: the largest dimension of that batch's tensors, 0 likewise.
        precision: the dtype that its largest product computes in ("bfloat16" under such an autocast), of those that
            modules with weights compute in.
        card_bytes: the smallest card, in bytes that torch reserves, that the step runs on; fragments included, the CUDA
            context not. 0 where the step runs on a CPU.
        resumed_card_bytes: the same where the optimizer's state is there before the first step, if that takes more.
        expandable_card_bytes: with expandable segments, in either case.
        room_bytes: what torch has reserved when the first step begins, all that is not in use in one piece, so that
            blocks find room: an applied plan sees to it, unless segments are expandable. 0: nothing is done.
        phase: where the peak is.
        tensors: the largest ones alive there, as (what, bytes).
    """

    peak_bytes: int
    plain_peak_bytes: int
    step_seconds: float
    plain_step_seconds: float
    recomputed_flops: int
    plain_flops: int
    saved_bytes: int
    plain_saved_bytes: int
    phase: str
    tensors: tuple[tuple[str, int], ...]
    cost_source: str
    offloaded_bytes: int = 0
    host_bytes: int = 0
    num_collectives: int = 0
    plain_num_collectives: int = 0
    num_all_gathers: int = 0
    num_scan_evaluations: int = 0
    forward_saved_bytes: int = 0
    held_bytes: int = 0
    batch_bytes: int = 0
    longest_dim: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    precision: str = ""
    is_later_step: bool = False
    card_bytes: int = 0
    resumed_card_bytes: int = 0
    expandable_card_bytes: int = 0
    room_bytes: int = 0

    @property
    def extra_time_ratio(self) -> float:
        """Extra time as a share of the plain step: 0.12 is 12 % slower."""
        return self.step_seconds / self.plain_step_seconds - 1 if self.plain_step_seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Which action each call gets, for which model, and what that is predicted to cost.

    Attributes:
        decisions: in call order.
        budget_bytes: what it was made for.
        budget_text: as the user wrote it.
        device: where it is meant to run.
        fingerprint: of the model it was made for (see `capture.fingerprint`).
        structure: (path, class) of each module named by a decision, to say what differs on another model.
        notes: sentences for people: what sets the peak, what was assumed.
        versions: of recoup and torch.
    """

    decisions: tuple[Decision, ...]
    budget_bytes: int
    budget_text: str
    device: str
    model_class: str
    fingerprint: str
    structure: tuple[tuple[str, str], ...]
    predicted: Prediction
    notes: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def regions(self) -> tuple[Region, ...]:
        """The decisions that make regions."""
        return tuple(d for d in self.decisions if isinstance(d, Region))

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data, keys in a stable order."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        decisions = [d.to_json() for d in self.decisions]
        return {"schema": SCHEMA, **fields, "decisions": decisions, "predicted": dataclasses.asdict(self.predicted)}

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, one that diffs well."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def from_json(cls, data: dict[str, Any], *, known: Sequence[type[Decision]] = DECISIONS) -> Plan:
        """Reads what `to_json` returned.

        Args:
            known: the classes that its decisions may be of.

        Raises:
            UsageError: if it is not a plan of this schema, or a decision does not fit its action.
        """
        check_schema(data, SCHEMA)
        if not isinstance(data.get("decisions"), list):
            raise UsageError(f"The plan's decisions must be a list; got {shown(data.get('decisions'))}.")
        fields = {k: v for k, v in data.items() if k not in ("schema", "decisions", "predicted")}
        decisions = tuple(read_decision(d, known) for d in data["decisions"])
        predicted = read_fields(Prediction, data.get("predicted"), "The plan's prediction")
        made = read_fields(cls, fields, "The plan", decisions=decisions, predicted=predicted)
        for owner in (made, predicted):
            for name in (f.name for f in dataclasses.fields(owner)):
                if isinstance(getattr(owner, name), (int, float)) and getattr(owner, name) < 0:
                    raise UsageError(f"The plan's {name} must not be negative; got {shown(getattr(owner, name))}.")
        return made

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan written by `save`.

        Raises:
            UsageError: if the file is missing or is not a plan.
        """
        try:
            data = json.loads(Path(path).read_bytes().decode())
        except FileNotFoundError:
            raise UsageError(f"No plan file at {shown(str(path))}.") from None
        except OSError as error:
            raise UsageError(f"{shown(str(path))} cannot be read: {error.strerror}.") from None
        except RecursionError:
            raise UsageError(f"{shown(str(path))} is no plan: its JSON is nested too deeply.") from None
        except ValueError as error:  # no UTF-8, no JSON, or a number of thousands of digits
            raise UsageError(f"{shown(str(path))} is not JSON: {shown(str(error))}. Give what `save` wrote.") from None
        return cls.from_json(data)

    def __repr__(self) -> str:
        predicted = self.predicted
        return (
            f"<Plan for {self.model_class} on {self.device}: {format_bytes(predicted.peak_bytes)} of "
            f"{format_bytes(predicted.plain_peak_bytes)}, {format_percent(predicted.extra_time_ratio)} time>"
        )

    def _repr_html_(self) -> str:
        predicted = self.predicted
        sizes = [("plain peak", predicted.plain_peak_bytes), ("predicted peak", predicted.peak_bytes)]
        does = format_decisions(self.decisions)
        title = f"Plan for {self.model_class} on {self.device}"
        return html.card(title, html.bars(sizes, self.budget_bytes), html.text(does), html.text(str(self), "all of it"))

    def __str__(self) -> str:
        """What the plan does in model terms, and what that is predicted to cost."""
        predicted = self.predicted
        plain = predicted.plain_peak_bytes
        if plain > self.budget_bytes:
            plain_text = f"{format_bytes(plain)}: the unplanned step does not fit the budget"
        else:
            plain_text = f"{format_bytes(plain)}: the unplanned step fits"
        budget = format_bytes(self.budget_bytes)
        if not self.budget_text.isdigit():
            budget += f" ({self.budget_text})"
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in predicted.tensors[:3])
        rows = [
            ("plain peak", plain_text),
            ("budget", budget),
            (
                "predicted peak",
                f"{format_bytes(predicted.peak_bytes)} ({format_share(predicted.peak_bytes, plain)} of plain)",
            ),
            (
                "saved for backward",
                f"{format_bytes(predicted.saved_bytes)}, plain {format_bytes(predicted.plain_saved_bytes)}",
            ),
            (
                "predicted time",
                f"{format_seconds(predicted.step_seconds)} a step, {format_percent(predicted.extra_time_ratio)} "
                f"({predicted.cost_source})",
            ),
            (
                "run twice",
                f"{format_flops(predicted.recomputed_flops)} of {format_flops(predicted.plain_flops)} "
                f"({format_share(predicted.recomputed_flops, predicted.plain_flops)})",
            ),
            ("peak is set by", f"the {predicted.phase}; largest there: {largest}"),
        ]
        if predicted.offloaded_bytes:
            held = f"up to {format_bytes(predicted.host_bytes)} there at a time"
            rows.insert(-1, ("to the host", f"{format_bytes(predicted.offloaded_bytes)} a step, and back; {held}"))
        if predicted.num_scan_evaluations:
            rows.insert(-1, ("scans", f"{predicted.num_scan_evaluations} step evaluations, forward and backward"))
        if predicted.num_collectives:
            again = predicted.num_collectives - predicted.plain_num_collectives
            rows.append(("collectives", f"{predicted.num_collectives} a step on each rank, {again} of them run again"))
        if predicted.num_all_gathers:
            rows.append(("all-gathers", f"{predicted.num_all_gathers} a step on each rank, as without a plan"))
        head = f"Plan for {self.model_class} on {self.device}"
        does = format_decisions(self.decisions)
        notes = "".join(
            "\n" + textwrap.fill(f"note: {note}", width(), subsequent_indent="      ") for note in self.notes
        )
        return f"{head}\n{format_rows(rows)}\n{does}{notes}"
