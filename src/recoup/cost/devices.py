"""Devices recoup can plan for without having one: rates, bandwidths and sizes, each with its source.

Rates are dense peaks of the vendor's datasheet; `matmul_fraction` and `bandwidth_fraction` are what large kernels
reach of them in practice (an assumption, stated in the plan's cost source as "roofline"). fp32 matmuls are counted at
the plain fp32 rate: torch leaves TF32 off for matmuls unless it is asked for.
"""

from __future__ import annotations

import dataclasses
import difflib

from recoup.errors import UsageError

_T, _G = 1e12, 1e9
_GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        bf16_flops, fp16_flops, fp32_flops: FLOP/s of dense matmuls. bandwidth_bytes: bytes/s of its memory.
        memory_bytes: what a program can have. copy_bytes: bytes/s to and from the host.
        launch_seconds: host time of one op. round_bytes: what its allocator rounds sizes up to.
        fixed_bytes: what libraries take once a step runs (cuBLAS workspace).
        dialect: "cpu" or "cuda". source: where the numbers come from.
    """

    name: str
    dialect: str
    bf16_flops: float
    fp16_flops: float
    fp32_flops: float
    bandwidth_bytes: float
    memory_bytes: int
    copy_bytes: float
    source: str
    launch_seconds: float = 5e-6
    round_bytes: int = 512
    fixed_bytes: int = 0
    matmul_fraction: float = 0.7
    bandwidth_fraction: float = 0.8


_CUBLAS_HOPPER = 32 * 2**20  # torch's default workspace on compute capability 9.0 (CUDABlas.cpp)
_CUBLAS = 8519680  # and elsewhere: 4096 KiB x 2 + 16 KiB x 8

_DEVICES = (
    Device(
        name="cpu-generic",
        dialect="cpu",
        bf16_flops=0.1 * _T,
        fp16_flops=0.1 * _T,
        fp32_flops=0.1 * _T,
        bandwidth_bytes=15 * _G,
        memory_bytes=16 * _GIB,
        copy_bytes=15 * _G,
        round_bytes=1,
        launch_seconds=3e-6,
        source="two cores of a server CPU as measured with torch 2.13",
    ),
    Device(
        name="a100-80gb",
        dialect="cuda",
        bf16_flops=312 * _T,
        fp16_flops=312 * _T,
        fp32_flops=19.5 * _T,
        bandwidth_bytes=2039 * _G,
        memory_bytes=80 * 10**9,
        copy_bytes=25 * _G,
        fixed_bytes=_CUBLAS,
        source="NVIDIA A100 80GB SXM datasheet",
    ),
    Device(
        name="a100-40gb",
        dialect="cuda",
        bf16_flops=312 * _T,
        fp16_flops=312 * _T,
        fp32_flops=19.5 * _T,
        bandwidth_bytes=1555 * _G,
        memory_bytes=40 * 10**9,
        copy_bytes=25 * _G,
        fixed_bytes=_CUBLAS,
        source="NVIDIA A100 40GB datasheet",
    ),
    Device(
        name="h100-sxm",
        dialect="cuda",
        bf16_flops=989 * _T,
        fp16_flops=989 * _T,
        fp32_flops=67 * _T,
        bandwidth_bytes=3350 * _G,
        memory_bytes=80 * 10**9,
        copy_bytes=50 * _G,
        fixed_bytes=_CUBLAS_HOPPER,
        source="NVIDIA H100 SXM datasheet (dense rates)",
    ),
    Device(
        name="h200",
        dialect="cuda",
        bf16_flops=989 * _T,
        fp16_flops=989 * _T,
        fp32_flops=67 * _T,
        bandwidth_bytes=4800 * _G,
        memory_bytes=141 * 10**9,
        copy_bytes=50 * _G,
        fixed_bytes=_CUBLAS_HOPPER,
        matmul_fraction=0.79,
        bandwidth_fraction=0.89,
        source="NVIDIA H200 datasheet; fractions from measured 784 TFLOP/s bf16 and 4.3 TB/s copies",
    ),
    Device(
        name="rtx-4090",
        dialect="cuda",
        bf16_flops=165.2 * _T,
        fp16_flops=165.2 * _T,
        fp32_flops=82.6 * _T,
        bandwidth_bytes=1008 * _G,
        memory_bytes=24 * _GIB,
        copy_bytes=25 * _G,
        fixed_bytes=_CUBLAS,
        source="NVIDIA Ada GPU architecture whitepaper (fp32 accumulation, dense)",
    ),
    Device(
        name="l4",
        dialect="cuda",
        bf16_flops=121 * _T,
        fp16_flops=121 * _T,
        fp32_flops=30.3 * _T,
        bandwidth_bytes=300 * _G,
        memory_bytes=24 * 10**9,
        copy_bytes=25 * _G,
        fixed_bytes=_CUBLAS,
        source="NVIDIA L4 datasheet (half of the sparse rates)",
    ),
    Device(
        name="t4",
        dialect="cuda",
        bf16_flops=8.1 * _T,
        fp16_flops=65 * _T,
        fp32_flops=8.1 * _T,
        bandwidth_bytes=320 * _G,
        memory_bytes=16 * 10**9,
        copy_bytes=12 * _G,
        fixed_bytes=_CUBLAS,
        source="NVIDIA T4 datasheet; no bf16 units, so bf16 runs at the fp32 rate",
    ),
)
DEVICES = {device.name: device for device in _DEVICES}


def get_device(name: str) -> Device:
    """Returns the device of that name.

    Raises:
        UsageError: if it is not in the table; names the closest ones.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        close = difflib.get_close_matches(name.lower(), DEVICES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"Unknown device {name!r}.{hint} Known: cpu, cuda, {', '.join(DEVICES)}.")
    return device
