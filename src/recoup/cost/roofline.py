"""Prices from a device's rates: an op takes as long as its FLOPs or its bytes, whichever is longer.

The roofline model (Williams, Waterman and Patterson, 2009). An estimate: good for comparing plans, and for a device
that is elsewhere. Hidden workspace is worked out by `hidden_memory.py`; what cuDNN takes for a convolution is not known
without the device.
"""

from __future__ import annotations

from recoup.cost.devices import Device
from recoup.cost.flops import kind, tensor_specs
from recoup.cost.hidden_memory import hidden_bytes
from recoup.cost.kernel_flags import KernelFlags
from recoup.cost.model import CostModel, PricedTrace, price_by_signature
from recoup.ir.trace import Signature, Trace


class RooflineCost(CostModel):
    """Prices ops for a device of the table."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.flags = KernelFlags.current()

    def price(self, trace: Trace) -> PricedTrace:
        """Returns the priced trace."""
        return price_by_signature(
            trace,
            lambda s: (self.seconds(s), self.workspace_bytes(s)),
            source=f"roofline of {self.device.name}",
            is_estimate=True,
        )

    def workspace_bytes(self, signature: Signature) -> int:
        """Returns one op's workspace in bytes."""
        return (
            hidden_bytes(signature, self.device, in_order=self.flags.is_in_order)
            if self.device.dialect == "cuda"
            else 0
        )

    def seconds(self, signature: Signature) -> float:
        """Returns the seconds of one op, its launch included."""
        device = self.device
        if signature.is_view:
            return 0.0
        moving = signature.bytes_moved / (device.bandwidth_bytes * device.bandwidth_fraction)
        computing = 0.0
        work = kind(signature.name)
        if work != "other":
            fraction = device.attention_fraction if work == "attention" else device.matmul_fraction
            computing = signature.flops / (self._rate(signature, work) * fraction)
        return max(moving, computing, device.launch_seconds if device.dialect == "cuda" else 0.0)

    def _rate(self, signature: Signature, work: str) -> float:
        dtypes = {spec.dtype for spec in tensor_specs(signature.args)}
        if "bfloat16" in dtypes:
            return self.device.bf16_flops
        if "float16" in dtypes:
            return self.device.fp16_flops
        if "float64" in dtypes:
            return self.device.fp32_flops / 2
        rounds = self.flags.tf32_conv if work == "convolution" else self.flags.tf32_matmul
        return self.device.tf32_flops if rounds else self.device.fp32_flops
