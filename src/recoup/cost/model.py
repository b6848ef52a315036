"""The contract of a cost model: seconds and workspace for each op of a trace, and the name of its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from recoup.cost.host_costs import TYPICAL, HostCosts
from recoup.ir.trace import Signature, Trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricedTrace:
    """A trace with prices.

    Attributes:
        op_seconds: of each op of the trace.
        op_workspace_bytes: of each op, the memory that it takes while it runs and gives back before it returns.
        source: where the numbers come from, for people.
        is_estimate: False where the device itself was measured.
        host_costs: what a plan's bookkeeping takes beside the kernels.
        copy_seconds: what copies to the host and back add to the step, beyond what hides behind compute.
        num_all_gathers: of the step on each rank, where it is sharded.
        num_scan_evaluations: step evaluations of scans whose bytes the applied plan decides.
        num_scan_tapes: calls of autograd's engine in scans.
        num_scan_replayed: ops of scans' steps that ran again.
    """

    trace: Trace
    op_seconds: tuple[float, ...]
    op_workspace_bytes: tuple[int, ...]
    source: str
    is_estimate: bool
    host_costs: HostCosts = TYPICAL
    copy_seconds: float = 0.0
    num_all_gathers: int = 0
    num_scan_evaluations: int = 0
    num_scan_tapes: int = 0
    num_scan_replayed: int = 0

    @property
    def serial_costs(self) -> HostCosts:
        """Host costs that add to the kernels' seconds: those of a CPU. A GPU works beside the host."""
        return self.host_costs if self.trace.device == "cpu" else HostCosts()


class CostModel(Protocol):
    """Prices a trace."""

    def price(self, trace: Trace) -> PricedTrace:
        """Returns the trace with seconds and workspace for each op."""
        ...

    def rest(self) -> None:
        """Gives back the memory that pricing works in; the next ops take it anew."""
        return


def price_by_signature(
    trace: Trace, price: Callable[[Signature], tuple[float, int]], *, source: str, is_estimate: bool
) -> PricedTrace:
    """Returns the priced trace, each distinct signature asked once."""
    prices = [price(signature) for signature in trace.signatures]
    return PricedTrace(
        trace=trace,
        op_seconds=tuple(prices[op.signature][0] for op in trace.ops),
        op_workspace_bytes=tuple(prices[op.signature][1] for op in trace.ops),
        source=source,
        is_estimate=is_estimate,
    )


NOMINAL_FLOPS = 1e12
"""FLOP/s where no device is named. Plans do not depend on it: everything is as many FLOPs as it is."""


class FlopsCost(CostModel):
    """Deterministic prices for tests: a second is 1e12 FLOPs plus 1e11 bytes moved; no workspace."""

    def price(self, trace: Trace) -> PricedTrace:
        """Returns the priced trace."""
        return price_by_signature(
            trace,
            lambda s: ((s.flops + 10 * s.bytes_moved) / NOMINAL_FLOPS, 0),
            source="flops",
            is_estimate=True,
        )
