"""Devices recoup can plan for without having one: rates, bandwidths and sizes, each with its source.

Rates are *dense* matmul peaks of the vendor's datasheet (some datasheets print them with 2:4 sparsity, twice as high).
float32 products have two rates, the plain one and that of TF32: torch's settings decide (`kernel_flags`). Peaks
are never reached; `matmul_fraction`, `attention_fraction` and `bandwidth_fraction` are what large kernels reach of
them in practice, assumptions unless the source says measured.
"""

from __future__ import annotations

import dataclasses
import difflib

from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        dialect: "cpu" or "cuda".
        capability: CUDA's compute capability, which decides which kernels there are.
        num_sms, threads_per_sm: multiprocessors, and the threads each holds: what reductions are split by.
        bf16_flops, fp16_flops, tf32_flops, fp32_flops: FLOP/s of dense matmuls.
        bandwidth_bytes: bytes/s of its memory.
        memory_bytes: what a program can have: a little less than what it is sold as.
        copy_bytes: bytes/s to and from the host, one direction, pinned memory.
        launch_seconds: the least an eager op takes.
        round_bytes: what its allocator rounds sizes up to.
        fixed_bytes: what libraries take once a step runs (cuBLAS workspace).
        context_bytes: the CUDA context and loaded kernels of a process, beside what torch allocates.
        matmul_fraction, attention_fraction, bandwidth_fraction: of the peaks, what large kernels reach.
        source: the datasheet.
        sources: where each number is from, as (field, source).
    """

    name: str
    dialect: str
    capability: tuple[int, int] | None
    num_sms: int
    threads_per_sm: int
    bf16_flops: float
    fp16_flops: float
    tf32_flops: float
    fp32_flops: float
    bandwidth_bytes: float
    memory_bytes: int
    copy_bytes: float
    launch_seconds: float
    round_bytes: int
    fixed_bytes: int
    context_bytes: int
    matmul_fraction: float
    attention_fraction: float
    bandwidth_fraction: float
    source: str
    sources: tuple[tuple[str, str], ...]


# [Note: cuBLAS workspace] torch gives each cuBLAS handle a workspace from its caching allocator, by handle and stream:
# 4096 KiB x 2 + 16 KiB x 8, on Hopper 32 MiB (aten/src/ATen/cuda/CublasHandlePool.cpp). Handles belong to threads, and
# backward runs in a thread of its own, so a training step has two. Products with a bias go through cuBLASLt, which has
# 1 MiB more.
CUBLASLT_BYTES = 1 << 20
_CUBLAS = 2 * 8519680 + CUBLASLT_BYTES
_CUBLAS_HOPPER = 2 * 32 * 2**20 + CUBLASLT_BYTES
_CUBLAS_SOURCE = "PyTorch, CublasHandlePool.cpp: default workspace, one for forward's thread and one for backward's"

# CUDA C++ Programming Guide: most resident threads of a multiprocessor, by compute capability.
_THREADS_PER_SM = {(7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048}

_PCIE = {
    3: (12e9, "PCIe 3.0 x16, 15.75 GB/s a direction; assumed reached: about 0.8 of it"),
    4: (25e9, "PCIe 4.0 x16, 31.5 GB/s a direction; assumed reached: about 0.8 of it"),
    5: (50e9, "PCIe 5.0 x16, 63 GB/s a direction; assumed reached: about 0.8 of it"),
}


def _nvidia(
    name: str,
    *,
    datasheet: str,
    bf16: float,
    fp16: float,
    fp32: float,
    bandwidth: float,
    gibibytes: float,
    pcie: int,
    capability: tuple[int, int],
    sms: int,
    matmul: float = 0.7,
    attention: float = 0.5,
    streaming: float = 0.8,
    notes: dict[str, str] | None = None,
) -> Device:
    """Returns a table entry; rates in TFLOP/s, bandwidth in GB/s, memory in GiB; `notes` replace default sources."""
    copy_bytes, copy_source = _PCIE[pcie]
    has_tf32 = capability >= (8, 0)
    sources = {
        "bf16_flops": datasheet,
        "fp16_flops": datasheet,
        "tf32_flops": f"{datasheet}: half the bfloat16 rate" if has_tf32 else "no TF32 in this generation: as float32",
        "fp32_flops": datasheet,
        "bandwidth_bytes": datasheet,
        "memory_bytes": "total capacity as torch reports it in CUDA out-of-memory messages, the least seen",
        "copy_bytes": copy_source,
        "capability": "NVIDIA, CUDA GPU compute capability (developer.nvidia.com/cuda-gpus)",
        "num_sms": datasheet,
        "threads_per_sm": "CUDA C++ Programming Guide, technical specifications by compute capability",
        "launch_seconds": "assumption: host time of an eager op",
        "round_bytes": "PyTorch, CUDACachingAllocator: kMinBlockSize",
        "fixed_bytes": _CUBLAS_SOURCE,
        "context_bytes": "assumption: 0.4 to 0.7 GiB is what nvidia-smi shows beside memory_reserved",
        "matmul_fraction": "assumption: large matmuls",
        "attention_fraction": "assumption: fused attention, forward and backward together",
        "bandwidth_fraction": "assumption: large elementwise ops",
        **(notes or {}),
    }
    return Device(
        name=name,
        dialect="cuda",
        capability=capability,
        num_sms=sms,
        threads_per_sm=_THREADS_PER_SM[capability],
        bf16_flops=bf16 * 1e12,
        fp16_flops=fp16 * 1e12,
        tf32_flops=bf16 / 2 * 1e12 if has_tf32 else fp32 * 1e12,
        fp32_flops=fp32 * 1e12,
        bandwidth_bytes=bandwidth * 1e9,
        memory_bytes=int(gibibytes * 2**30),
        copy_bytes=copy_bytes,
        launch_seconds=5e-6,
        round_bytes=MIN_BLOCK_BYTES,
        context_bytes=768 << 20,
        fixed_bytes=_CUBLAS_HOPPER if capability in ((9, 0), (10, 0)) else _CUBLAS,
        matmul_fraction=matmul,
        attention_fraction=attention,
        bandwidth_fraction=streaming,
        source=datasheet,
        sources=tuple(sources.items()),
    )


_NO_BF16 = "no bfloat16 tensor cores in this generation: taken as the float32 rate (assumption)"
_POWER = "assumption: about 70 W hold the clock well under boost, so less of the datasheet's peak than elsewhere"
_CPU_SOURCE = "two cores of a server CPU as measured with torch 2.13"

_DEVICES = (
    Device(
        name="cpu-generic",
        dialect="cpu",
        capability=None,
        num_sms=1,
        threads_per_sm=1,
        bf16_flops=1e11,
        fp16_flops=1e11,
        tf32_flops=1e11,
        fp32_flops=1e11,
        bandwidth_bytes=15e9,
        memory_bytes=16 * 2**30,
        copy_bytes=15e9,
        launch_seconds=3e-6,
        round_bytes=1,
        fixed_bytes=0,
        context_bytes=0,
        matmul_fraction=0.7,
        attention_fraction=0.5,
        bandwidth_fraction=0.8,
        source=_CPU_SOURCE,
        sources=(
            ("bf16_flops", "assumption: as float32, without bfloat16 units"),
            ("fp16_flops", "assumption: as float32, without float16 units"),
            ("tf32_flops", "no TF32 on a CPU: as float32"),
            ("fp32_flops", _CPU_SOURCE),
            ("bandwidth_bytes", _CPU_SOURCE),
            ("memory_bytes", "assumption"),
            ("capability", "not a GPU"),
            ("num_sms", "not a GPU"),
            ("threads_per_sm", "not a GPU"),
            ("copy_bytes", "a copy within the same memory"),
            ("launch_seconds", "assumption: dispatch of an eager op"),
            ("round_bytes", "PyTorch's CPU allocator aligns to 64 bytes and counts what was asked for"),
            ("context_bytes", "not a GPU"),
            ("fixed_bytes", "no library keeps blocks of torch's CPU allocator"),
            ("matmul_fraction", "assumption: large matmuls"),
            ("attention_fraction", "assumption: fused attention"),
            ("bandwidth_fraction", "assumption: large elementwise ops"),
        ),
    ),
    _nvidia(
        "a100-80gb",
        datasheet="NVIDIA A100 datasheet (80GB SXM)",
        bf16=312,
        fp16=312,
        fp32=19.5,
        bandwidth=2039,
        gibibytes=79.15,
        pcie=4,
        capability=(8, 0),
        sms=108,
    ),
    _nvidia(
        "a100-40gb",
        datasheet="NVIDIA A100 datasheet (40GB)",
        bf16=312,
        fp16=312,
        fp32=19.5,
        bandwidth=1555,
        gibibytes=39.39,
        pcie=4,
        capability=(8, 0),
        sms=108,
    ),
    _nvidia(
        "h100-sxm",
        datasheet="NVIDIA H100 datasheet and architecture whitepaper (SXM5, dense rates)",
        bf16=989.4,
        fp16=989.4,
        fp32=66.9,
        bandwidth=3350,
        gibibytes=79.1,
        pcie=5,
        capability=(9, 0),
        sms=132,
    ),
    _nvidia(
        "h200",
        datasheet="NVIDIA H200 datasheet; H100 architecture whitepaper for the dense rates",
        bf16=989.4,
        fp16=989.4,
        fp32=66.9,
        bandwidth=4800,
        gibibytes=139.7,
        pcie=5,
        capability=(9, 0),
        sms=132,
        matmul=0.79,
        streaming=0.89,
        notes={
            "matmul_fraction": "measured: bfloat16 matmul of 8192^3 at 769 to 798 TFLOP/s",
            "bandwidth_fraction": "measured: device copy at 4.3 TB/s",
        },
    ),
    _nvidia(
        "b200",
        datasheet="NVIDIA HGX B200 datasheet, one GPU of eight (dense rates)",
        bf16=2250,
        fp16=2250,
        fp32=75,
        bandwidth=7700,
        gibibytes=178.3,
        pcie=5,
        capability=(10, 0),
        sms=148,
        notes={"fixed_bytes": "assumption: as on Hopper; the default moved between torch versions"},
    ),
    _nvidia(
        "rtx-4090",
        datasheet="NVIDIA Ada GPU architecture whitepaper (fp32 accumulation, dense)",
        bf16=165.2,
        fp16=165.2,
        fp32=82.6,
        bandwidth=1008,
        gibibytes=23.5,
        pcie=4,
        capability=(8, 9),
        sms=128,
    ),
    _nvidia(
        "a10g",
        datasheet="NVIDIA A10G datasheet (AWS G5)",
        bf16=70,
        fp16=70,
        fp32=35,
        bandwidth=600,
        gibibytes=21.9,
        pcie=4,
        capability=(8, 6),
        sms=80,
    ),
    _nvidia(
        "l4",
        datasheet="NVIDIA L4 datasheet (half of the sparse rates)",
        bf16=121,
        fp16=121,
        fp32=30.3,
        bandwidth=300,
        gibibytes=21.9,
        pcie=4,
        capability=(8, 9),
        sms=58,
        matmul=0.5,
        attention=0.4,
        notes={"matmul_fraction": _POWER, "attention_fraction": _POWER},
    ),
    _nvidia(
        "t4",
        datasheet="NVIDIA T4 product brief",
        bf16=8.1,
        fp16=65,
        fp32=8.1,
        bandwidth=320,
        gibibytes=14.5,
        pcie=3,
        capability=(7, 5),
        sms=40,
        matmul=0.5,
        attention=0.35,
        notes={"bf16_flops": _NO_BF16, "matmul_fraction": _POWER, "attention_fraction": _POWER},
    ),
    _nvidia(
        "v100-16gb",
        datasheet="NVIDIA V100 datasheet (SXM2)",
        bf16=15.7,
        fp16=125,
        fp32=15.7,
        bandwidth=900,
        gibibytes=15.7,
        pcie=3,
        capability=(7, 0),
        sms=80,
        attention=0.35,
        notes={"bf16_flops": _NO_BF16},
    ),
)
DEVICES = {device.name: device for device in _DEVICES}


def get_device(name: str) -> Device:
    """Returns the device of that name.

    Raises:
        UsageError: if it is not in the table; names the closest ones.
    """
    device = DEVICES.get(name.strip().lower())
    if device is None:
        close = difflib.get_close_matches(name.strip().lower(), DEVICES, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(repr(match) for match in close)}?" if close else ""
        raise UsageError(f"Unknown device {name!r}.{hint} Known: cpu, cuda, {', '.join(DEVICES)}.")
    return device
