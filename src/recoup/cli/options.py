"""The options that commands share, and what they become; everything that needs no torch is checked before it loads."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recoup.cost.devices import get_device
from recoup.errors import UsageError
from recoup.planner.incumbents import EFFORTS
from recoup.targets.parse import parse_target
from recoup.units import check_budget, parse_bytes

if TYPE_CHECKING:
    from recoup.targets.resolve import Target

_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
_OPTIMIZERS = {
    name.lower(): name
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
}

TargetText = Annotated[
    str, typer.Argument(metavar="TARGET", help="FILE.py[:FUNCTION], hf:MODEL_TYPE?key=value, or jax:FILE.py:FUNCTION")
]
TorchTargetText = Annotated[str, typer.Argument(metavar="TARGET", help="FILE.py[:FUNCTION] or hf:MODEL_TYPE?key=value")]
Budget = Annotated[
    str, typer.Option(help="Peak bytes of the step: 8GiB, 60% (of the unplanned peak), min (the smallest), or auto")
]
BudgetIfAny = Annotated[str | None, typer.Option(help="Also plan for this: 8GiB, 60%, min, or auto")]
Batch = Annotated[int | None, typer.Option(help="Examples in the batch", min=1)]
Seq = Annotated[int | None, typer.Option(help="Tokens of each example", min=1)]
Image = Annotated[int | None, typer.Option(help="Pixels along an edge", min=1)]
Dtype = Annotated[str | None, typer.Option(help="Of the parameters: fp32, bf16 or fp16")]
Optimizer = Annotated[str | None, typer.Option(help="Its state counts too: sgd, adam, adamw, ...")]
PlanDevice = Annotated[str | None, typer.Option(help="Where the plan will run: cpu, cuda, or e.g. h100-sxm, a100-80gb")]
RunDevice = Annotated[str | None, typer.Option(help="Where to run: cpu or cuda")]
Actions = Annotated[
    str | None,
    typer.Option(
        help="What a plan may use, with commas: rederive, recompute, loss-in-place, tile, rebuild, offload, "
        "tile-modules"
    ),
]
HostBudget = Annotated[
    str | None, typer.Option(help="Bytes of host memory that a plan may hold: 64GiB. Offload is then a default action")
]
Effort = Annotated[str, typer.Option(help="How long to search once a plan fits: low, normal or high")]
Fsdp = Annotated[int | None, typer.Option(help="Bytes of one rank of so many, sharded as FSDP2 does", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr")]
Out = Annotated[Path | None, typer.Option(help="Also write the plan here, as JSON", dir_okay=False)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options given, checked as far as is possible without torch."""

    text: str
    batch: int | None
    seq: int | None
    image: int | None
    dtype: str | None
    optimizer: str | None
    device: str | None
    actions: str | None
    host_budget: str | None = None
    fsdp: int | None = None
    effort: str = "normal"

    def resolve(self, *, runs: bool) -> Target:
        """Returns the target: with data where the step `runs`, else `hf:` models without."""
        from recoup.targets.resolve import resolve_target

        if self.text.startswith("hf:"):
            silence_transformers()
        return resolve_target(
            self.text,
            batch=self.batch,
            seq=self.seq,
            image=self.image,
            dtype=self.dtype,
            device=(self.device or "cpu") if runs else "meta",
        )

    def keywords(self, target: Target) -> dict[str, Any]:
        """Returns the keywords common to the API's functions: step, optimizer, and the device if one was named."""
        keywords: dict[str, Any] = {**target.step, "optimizer": target.optimizer}
        if self.optimizer is not None:
            import torch

            keywords["optimizer"] = getattr(torch.optim, self.optimizer)
        if self.device is not None:
            keywords["device"] = self.device
        return keywords

    def planning_keywords(self, target: Target) -> dict[str, Any]:
        """Returns `keywords`, and the actions if some were named."""
        keywords = self.keywords(target)
        if self.fsdp is not None:
            from recoup.cost.roofline import RooflineCost
            from recoup.cost.sharding import ShardedCost

            assert self.device is not None  # check_request saw to it
            keywords["cost"] = ShardedCost(RooflineCost(get_device(self.device)), world_size=self.fsdp)
        if self.actions is not None:
            keywords["actions"] = tuple(name.strip() for name in self.actions.split(",") if name.strip())
        if self.host_budget is not None:
            keywords["host_budget"] = self.host_budget
        if self.effort != "normal":
            keywords["effort"] = self.effort
        return keywords


def check_request(
    text: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    image: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    device: str | None = None,
    actions: str | None = None,
    budget: str | None = None,
    host_budget: str | None = None,
    out: Path | None = None,
    fsdp: int | None = None,
    effort: str = "normal",
    runs: bool = False,
) -> Request:
    """Returns the checked options.

    Args:
        text: the TARGET.
        runs: whether steps will be run, for which the device has to be here.

    Raises:
        UsageError: for a value that cannot be used.
    """
    if budget is not None:
        check_budget(budget)
    if host_budget is not None:
        parse_bytes(host_budget)
    parse_target(text)
    if fsdp is not None and (device is None or device == "cpu" or device.split(":")[0] == "cuda"):
        raise UsageError("--fsdp needs the name of a device: --fsdp 8 --device h100-sxm.")
    if device is not None:
        _check_device(device, runs=runs)
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {str(out.parent)!r}. Make it first.")
    return Request(
        text=text,
        batch=batch,
        seq=seq,
        image=image,
        dtype=_look_up(dtype, _DTYPES, "--dtype"),
        optimizer=_look_up(optimizer, _OPTIMIZERS, "--optimizer"),
        device=device,
        actions=actions,
        host_budget=host_budget,
        fsdp=fsdp,
        effort=_look_up(effort, {name: name for name in EFFORTS}, "--effort") or "normal",
    )


def _look_up(value: str | None, table: dict[str, str], option: str) -> str | None:
    if value is None:
        return None
    found = table.get(value.lower())
    if found is None:
        close = difflib.get_close_matches(value.lower(), table, n=1)
        advice = f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(table)}."
        raise UsageError(f"Unknown {option} {value!r}. {advice}")
    return found


def _check_device(device: str, *, runs: bool) -> None:
    if device == "cpu" or device.split(":")[0] == "cuda":
        return
    get_device(device)  # raises for a name that is not in the table
    if runs:
        raise UsageError(
            f"--device {device} can be planned for, but this command runs steps, and needs the device itself. Use "
            "`recoup plan`, or --device cpu or cuda."
        )


def silence_transformers() -> None:
    """Silences transformers' warnings about configurations: random weights have no tokenizer."""
    try:
        import transformers
    except ImportError:  # resolve_target says what to do
        return
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
