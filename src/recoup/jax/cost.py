"""Seconds of equations: by FLOPs alone, which is the same everywhere, or by the roofline of a device of the table."""

from __future__ import annotations

import dataclasses
from typing import Any

from recoup.cost.devices import Device, get_device
from recoup.cost.model import NOMINAL_FLOPS
from recoup.jax._jax import is_on_host, open_jaxpr
from recoup.jax.flops import array_bytes, bytes_moved, eqn_flops, sub_jaxprs

_VIEWS = frozenset(("reshape", "squeeze", "expand_dims", "name", "stop_gradient", "broadcast_in_dim", "iota"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Prices equations.

    Attributes:
        device: of the table, or None: FLOPs only.
    """

    device: Device | None = None

    @property
    def source(self) -> str:
        """What the seconds rest on, in words."""
        return f"roofline of {self.device.name}" if self.device else "FLOPs at a nominal 1 TFLOP/s"

    def seconds(self, eqn: Any) -> float:
        """Returns what one run of an equation takes."""
        if self.device is None:
            return eqn_flops(eqn) / NOMINAL_FLOPS
        inside = [self.jaxpr_seconds(j) for j in sub_jaxprs(eqn)]
        if inside and eqn.primitive.name != "pallas_call":
            return max(inside) * (int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1)
        if eqn.primitive.name in _VIEWS:
            return 0.0
        if eqn.primitive.name == "device_put" and any(is_on_host(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            return array_bytes(eqn.outvars[0].aval) / self.device.copy_bytes
        moving = bytes_moved(eqn) / (self.device.bandwidth_bytes * self.device.bandwidth_fraction)
        if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
            return moving
        itemsize = eqn.outvars[0].aval.dtype.itemsize
        rate = {1: self.device.bf16_flops, 2: self.device.bf16_flops}.get(itemsize, self.device.fp32_flops)
        return max(moving, eqn_flops(eqn) / (rate * self.device.matmul_fraction))

    def jaxpr_seconds(self, jaxpr: Any) -> float:
        """Returns what one run of all its equations takes."""
        return sum(self.seconds(eqn) for eqn in open_jaxpr(jaxpr)[0].eqns)


def costs_for(device: str | None) -> Costs:
    """Returns the prices for a device of the table, None: FLOPs.

    Raises:
        UsageError: if there is no such device.
    """
    return Costs(device=None if device is None else get_device(device))
