"""The settings of torch that decide which kernel an op takes: prices hold only under those they were measured under."""

from __future__ import annotations

import dataclasses

import torch

from recoup import _torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelFlags:
    """How float32 products are computed, how cuDNN chooses, and whether kernels have to be deterministic.

    Attributes:
        tf32_matmul, tf32_conv: float32 on CUDA is rounded to TF32.
        benchmark: cuDNN tries its algorithms.
        cudnn_deterministic, deterministic: of cuDNN alone, of all ops.
        warns_only: ops that have no deterministic kernel only warn, and some that have one take the other.
    """

    tf32_matmul: bool
    tf32_conv: bool
    benchmark: bool
    cudnn_deterministic: bool
    deterministic: bool
    warns_only: bool

    @classmethod
    def current(cls) -> KernelFlags:
        """Returns the flags as they are set now."""
        cudnn = torch.backends.cudnn
        deterministic, warns_only = _torch.deterministic_mode()
        return cls(
            tf32_matmul=torch.backends.cuda.matmul.fp32_precision == "tf32",
            tf32_conv=cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
            benchmark=cudnn.benchmark,
            cudnn_deterministic=cudnn.deterministic,
            deterministic=deterministic,
            warns_only=warns_only,
        )

    @property
    def is_in_order(self) -> bool:
        """Whether attention adds in a fixed order."""
        return self.deterministic and not self.warns_only

    def put(self) -> None:
        """Sets them, for good: in a process that does nothing else."""
        cudnn = torch.backends.cudnn
        torch.backends.cuda.matmul.fp32_precision = "tf32" if self.tf32_matmul else "ieee"
        cudnn.conv.fp32_precision = "tf32" if self.tf32_conv else "ieee"  # type: ignore[attr-defined]
        cudnn.benchmark, cudnn.deterministic = self.benchmark, self.cudnn_deterministic
        _torch.set_deterministic_mode((self.deterministic, self.warns_only))

    def __str__(self) -> str:
        return "|".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))
