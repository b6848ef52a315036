"""A card's ops, hidden memory and allocator, as predicted without it, against the CUDA build."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import warnings

import pytest
import torch

from recoup._torch import clear_cublas_workspaces
from recoup.capture.attention_choice import attention_kernel
from recoup.cost.caching_allocator import CachingAllocator, OutOfCard
from recoup.cost.devices import DEVICES, get_device
from recoup.cost.hidden_memory import hidden_blocks
from recoup.cost.library_memory import library_bytes
from recoup.cost.signature import make_signature
from recoup.evidence.deterministic import deterministic_kernels

pytest.importorskip("tests.cuda_stub.kit")
aten = torch.ops.aten
MIB = 1 << 20


class Told(CachingAllocator):
    """Puts segments where the real one put them."""

    address = 0

    def _place(self, nbytes: int) -> int:
        return super()._place(nbytes) if self.expandable else self.address


@pytest.mark.parametrize("seed", range(6))
def test_the_allocator_event_by_event(seed: int) -> None:
    rng = random.Random(seed)
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0, "a test before this one has left something on the card"
    limit = rng.choice([None, 2 << 30])
    torch.cuda.set_per_process_memory_fraction((limit or total) / total)
    simulated = Told(limit_bytes=limit)
    live: list[tuple[torch.Tensor, object]] = []
    sizes = [rng.choice([512, 4096, 1 << 19, MIB, 3 * MIB, 13 * MIB, 64 * MIB, 133 * MIB]) + 300 * i for i in range(9)]
    try:
        for _ in range(500):
            if live and rng.random() < 0.5:
                tensor, block = live.pop(rng.randrange(len(live)))
                del tensor
                simulated.free(block)  # type: ignore[arg-type]
            else:
                size, tensor, block = rng.choice(sizes), None, None
                with contextlib.suppress(torch.OutOfMemoryError):
                    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                    simulated.address = tensor.data_ptr()
                with contextlib.suppress(OutOfCard):
                    block = simulated.allocate(size)
                assert (tensor is None) == (block is None)
                if tensor is not None:
                    live.append((tensor, block))
                del tensor
            assert simulated.reserved_bytes == torch.cuda.memory_reserved()
            assert simulated.allocated_bytes == torch.cuda.memory_allocated()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_choice_of_attention() -> None:
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    capability = torch.cuda.get_device_capability()
    for dtype, width, mask, dropout, causal, heads, length in itertools.product(
        (torch.float16, torch.bfloat16, torch.float32, torch.float64),
        (60, 64, 200, 264),
        (None, torch.bool),
        (0.0, 0.1),
        (False, True),
        (4, 2),
        (64, 77),
    ):
        if mask is not None and causal:
            continue
        query = torch.empty(2, 4, length, width, device="cuda", dtype=dtype, requires_grad=True)
        key = torch.empty(2, heads, 64, width, device="cuda", dtype=dtype, requires_grad=True)
        given = None if mask is None else torch.empty(length, 64, device="cuda", dtype=mask)
        grouped = heads != 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = torch._fused_sdp_choice(query, key, key, given, dropout, causal, enable_gqa=grouped)
        ours = attention_kernel(
            query, key, key, given, dropout=dropout, causal=causal, grouped=grouped, capability=capability
        )
        assert ours == names[chosen], (dtype, width, mask, dropout, causal, heads, length)


def cases() -> list[tuple[object, tuple[object, ...]]]:
    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    found: list[tuple[object, tuple[object, ...]]] = []
    for shape, dims in [((8192, 768), [0]), ((25088, 4096), [0]), ((128, 64, 56, 56), [0, 2, 3]), ((8192, 33), [0])]:
        found += [(aten.sum.dim_IntList, (new(*shape, dtype=d), dims, True)) for d in (torch.bfloat16, torch.float32)]
    query = new(2, 200, 4, 64).transpose(1, 2)
    out = aten._scaled_dot_product_flash_attention.default(query, query, query, 0.0, False, False)
    flash = (query, query, query, query, *out[:6], 0.0, False, out[6], out[7])
    found.append((aten._scaled_dot_product_flash_attention_backward.default, flash))
    out = aten._scaled_dot_product_efficient_attention.default(query, query, query, None, True)
    efficient = (query, query, query, query, None, *out[:4], 0.0, [True, True, True, False])
    found.append((aten._scaled_dot_product_efficient_attention_backward.default, efficient))
    x = new(4096, 512, dtype=torch.float32)
    found.append((aten._softmax_backward_data.default, (x, x, -1, torch.float32)))
    found.append((aten.mse_loss.default, (x, x)))
    image, weight = new(16, 64, 64, 64), new(64)
    found.append((aten.native_group_norm.default, (image, weight, weight, 16, 64, 64 * 64, 8, 1e-5)))
    found.append((aten.upsample_nearest2d_backward.default, (new(4, 128, 64, 64)[:, :64], [64, 64], [4, 64, 32, 32])))
    found.append((aten.mm.default, (new(1, 1).expand(512, 512), new(512, 512))))
    return found


@pytest.mark.parametrize("in_order", [False, True])
def test_memory_that_kernels_take_while_they_run(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_device({75: "t4", 80: "a100-80gb", 89: "rtx-4090", 90: "h100-sxm"}.get(_capability(), "h100-sxm"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic_kernels() if in_order else contextlib.nullcontext():
        for op, args in cases():
            op(*args)  # type: ignore[operator]
            torch.cuda.reset_peak_memory_stats()
            out = op(*args)  # type: ignore[operator]
            stats = torch.cuda.memory_stats()
            seen = stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]
            known = sum(itertools.chain(*hidden_blocks(make_signature(op, args, {}, out), device, in_order=in_order)))
            assert known == pytest.approx(seen, rel=0.02, abs=2048), op
            del out


def test_image_and_weight_choose_the_layout_that_a_gradient_is_copied_to() -> None:
    device = get_device("h100-sxm")
    gradient, image = torch.empty(32, 64, 16, 16, device="cuda"), torch.empty(32, 4, 32, 32, device="cuda")
    weight = torch.empty(64, 4, 2, 2, device="cuda")

    def taken(*args: torch.Tensor) -> tuple[int, int]:
        rest = ([0], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        op = aten.convolution_backward.default
        op(*args, *rest)
        torch.cuda.reset_peak_memory_stats()
        out = op(*args, *rest)
        stats = torch.cuda.memory_stats()
        known = sum(itertools.chain(*hidden_blocks(make_signature(op, (*args, *rest), {}, out), device)))
        return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"], known

    workspace, none = taken(gradient, image, weight)
    assert none == 0
    last = {"memory_format": torch.channels_last}
    for args in ((gradient.to(**last), image, weight), (gradient, image.to(**last), weight.to(**last))):
        seen, known = taken(*args)
        assert known and known == seen - workspace


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def test_workspaces_of_cublas_are_those_of_the_table() -> None:
    of_card = {d.fixed_bytes for d in DEVICES.values() if d.capability == torch.cuda.get_device_capability()}
    assert of_card <= {library_bytes(torch.device("cuda"))}
