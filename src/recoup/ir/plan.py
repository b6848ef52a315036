"""What each call does: plain data, JSON, independent of torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from recoup.errors import UsageError

Action = Literal["save", "rederive", "recompute", "tile", "offload"]
Inside = Literal["save", "rederive"]
TileOf = Literal["loss", "module"]
SCHEMA = "recoup-plan/1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one call does with what autograd would save.

    A decision holds for everything below its path until a decision of a deeper path takes over: `rederive` at ""
    with `save` at "head" rederives everywhere but in the head.

    Attributes:
        path: dotted module path; "" is the model itself.
        call: which execution of that module in the step, or None for every one.
        action: `save` and `rederive` set what happens to saved tensors from here down; `recompute` makes the call a
            region: it keeps its inputs and runs again in backward; `offload` moves what is saved from here down to
            the host, and back before backward reads it.
        inside: for `recompute`, what the replay does with its saved tensors; for `offload`, what happens to saved
            tensors first: with "rederive" only what cannot be rebuilt is moved.
        span: for `recompute`, paths of the calls that follow directly and belong to the same region.
        buffers: for `recompute`, paths of buffers that the region's forward was seen to change; the replay runs
            on copies of what they were. (Those of normalisation layers are found by themselves.)
        chunk: for `recompute`, how many calls of the module that follow each other make one region: a loop over time.
        calls: with `chunk`, only so many calls, from the first; None: all.
        keep: for `recompute`, ops whose results the region keeps, so that its replay need not run them: "attention",
            "matmul:KxN" by the shape of the right factor, "convolution:..." by that of the weight.
        offload: for `recompute`, whether the inputs that the region keeps go to the host.
        tile_tokens: for `tile`, tokens of a tile; None: as many as `recoup.tiled_cross_entropy` takes by itself.
        scan: for `recompute`, the decision is about a `recoup.recurrent.scan` that the call's own forward runs: which
            one, counted from 0 in the order they begin (those in calls inside of it count too). No region is made.
        scan_bytes: with `scan`, what that loop may take, as its `budget=`; more than all its steps taped: nothing runs
            twice.
        tile_of: for `tile`, whether the call makes the logits, and the loss runs over tiles of them, or is a
            position-wise module that does so itself (then `tile_tokens` is needed).
    """

    path: str
    action: Action
    call: int | None = None
    inside: Inside = "save"
    span: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    chunk: int | None = None
    calls: int | None = None
    tile_tokens: int | None = None
    tile_of: TileOf = "loss"
    offload: bool = False
    keep: tuple[str, ...] = ()
    scan: int | None = None
    scan_bytes: int | None = None

    @property
    def is_region(self) -> bool:
        """Whether it makes its call a region; a decision about a scan recomputes steps, not the call."""
        return self.action == "recompute" and self.scan is None

    def holds(self, call: int) -> bool:
        """Whether it is about the call of that number, counted from 0, of its path."""
        return (self.call is None or self.call == call) and (self.calls is None or call < self.calls)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulated step costs.

    Attributes:
        peak_bytes: peak of the whole step, everything counted. plain_peak_bytes: the same without a plan.
        step_seconds, plain_step_seconds: by the cost source named in `cost_source`.
        extra_time_ratio: step_seconds / plain_step_seconds - 1.
        recomputed_flops: FLOPs run a second time. plain_flops: FLOPs of the step without a plan.
        saved_bytes, plain_saved_bytes: bytes that autograd holds when backward begins.
        offloaded_bytes: bytes moved to the host in one step.
        num_scan_evaluations: step evaluations of the scans whose bytes the plan decides, forward and backward together.
        num_all_gathers: of the step on each rank, where it is sharded (`plan --fsdp`); with the plan as without.
        phase: where the peak is. tensors: the largest ones alive there, as (what, bytes).
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
    num_all_gathers: int = 0
    num_scan_evaluations: int = 0

    @property
    def extra_time_ratio(self) -> float:
        """Extra time as a share of the plain step: 0.12 is 12 % slower."""
        return self.step_seconds / self.plain_step_seconds - 1 if self.plain_step_seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which action each call gets, for which model, and what that is predicted to cost.

    Attributes:
        decisions: in call order.
        budget_bytes: what it was made for. budget_text: as the user wrote it.
        device: where it is meant to run. fingerprint: of the model it was made for (see `capture.fingerprint`).
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
    def regions(self) -> tuple[Decision, ...]:
        """The decisions that make regions."""
        return tuple(d for d in self.decisions if d.is_region)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data, keys in a stable order."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, one that diffs well."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Reads what `to_json` returned.

        Raises:
            UsageError: if it is not a plan of this schema.
        """
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise UsageError(f"Not a recoup plan: expected schema {SCHEMA!r}, found {found!r}.")
        fields = {k: v for k, v in data.items() if k != "schema"}
        try:
            fields["decisions"] = tuple(_decision(d) for d in fields["decisions"])
            predicted = dict(fields["predicted"])
            predicted["tensors"] = tuple((str(n), int(b)) for n, b in predicted["tensors"])
            fields["predicted"] = Prediction(**predicted)
            for key in ("structure", "versions"):
                fields[key] = tuple((str(a), str(b)) for a, b in fields[key])
            fields["notes"] = tuple(fields["notes"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"Not a complete recoup plan: {error}.") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan written by `save`.

        Raises:
            UsageError: if the file is missing or is not a plan.
        """
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise UsageError(f"No plan file at {str(path)!r}.") from None
        except json.JSONDecodeError as error:
            raise UsageError(f"{str(path)!r} is not JSON: {error}.") from None
        return cls.from_json(data)

    def __str__(self) -> str:
        from recoup.report.text import format_plan  # report/ stands above ir/: only needed when somebody prints

        return format_plan(self)


def _decision(data: dict[str, Any]) -> Decision:
    lists = {key: tuple(data.get(key, ())) for key in ("span", "buffers", "keep")}
    return Decision(**{**data, **lists})
