"""What steps take from a card: the allocator by sizes, and a step's events run through it."""

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.cost import devices
from recoup.cost.caching_allocator import CachingAllocator, OutOfCard
from recoup.cost.card_memory import _sums_in_place
from recoup.cost.hidden_memory import hidden_blocks
from recoup.cost.signature import make_signature
from recoup.ir.trace import Op

MIB = 1 << 20


def test_sizes_of_segments_and_what_is_left_over() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512, 2 * MIB)
    allocator.allocate(3 * MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(16 * MIB + MIB // 2)  # of the 17 MiB that are left: half a MiB is too little to cut off
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MIB + 512, 22 * MIB)


def test_free_neighbours_join_and_are_cut_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    allocator.allocate(14 * MIB)
    assert allocator.reserved_bytes == 20 * MIB and allocator.allocated_bytes == 20 * MIB  # one MiB stays with it


def test_at_the_limit_free_segments_go_back() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(90 * MIB)
    assert allocator.reserved_bytes == 90 * MIB
    with pytest.raises(OutOfCard):
        allocator.allocate(20 * MIB)


def test_expandable_segments_leave_no_gaps() -> None:
    sizes = [30 * MIB, 50 * MIB, 70 * MIB, 90 * MIB]
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        for size in sizes:
            allocator.free(allocator.allocate(size))
        reserved[expandable] = allocator.reserved_bytes
    assert reserved == {False: sum(sizes), True: 100 * MIB}


@pytest.mark.parametrize("expandable", [False, True])
def test_books_are_kept(expandable: bool) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        allocator = CachingAllocator(expandable=expandable, limit_bytes=rng.choice([None, 500 * MIB]))
        live = []
        for _ in range(300):
            if live and rng.random() < 0.5:
                allocator.free(live.pop(rng.randrange(len(live))))
            else:
                try:
                    live.append(allocator.allocate(rng.choice([300, 70_000, MIB, 3 * MIB, 17 * MIB, 44 * MIB])))
                except OutOfCard:
                    assert allocator.limit_bytes is not None
            assert allocator.allocated_bytes == sum(b.size for b in live) <= allocator.reserved_bytes
        spans = sorted((b.address, b.address + b.size) for b in live)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        for block in live:
            allocator.free(block)
        allocator.empty_cache()
        assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_what_passes_through_is_allocated_and_freed(expandable: bool) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        limit = rng.choice([None, 200 * MIB])
        one, other = (CachingAllocator(expandable=expandable, limit_bytes=limit) for _ in range(2))
        live = []
        for _ in range(200):
            nbytes = rng.choice([300, 70_000, MIB, 3 * MIB, 17 * MIB, 44 * MIB])
            try:
                if live and rng.random() < 0.4:
                    for allocator, block in zip((one, other), live.pop(rng.randrange(len(live))), strict=True):
                        allocator.free(block)
                elif rng.random() < 0.5:
                    one.pass_through(nbytes)
                    other.free(other.allocate(nbytes))
                else:
                    live.append((one.allocate(nbytes), other.allocate(nbytes)))
            except OutOfCard:
                assert limit is not None
                with pytest.raises(OutOfCard):
                    other.allocate(nbytes)
            assert one.free_places() == other.free_places()
            assert (one.peak_allocated_bytes, one.reserved_bytes) == (other.peak_allocated_bytes, other.reserved_bytes)


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())))


def test_plans_for_a_card_say_what_it_must_have() -> None:
    batch = torch.empty(4096, 1024, device="meta")
    made = recoup.plan(model(), batch, budget="70%", optimizer=torch.optim.AdamW, device="h100-sxm")
    predicted = made.predicted
    assert predicted.peak_bytes <= predicted.card_bytes < 1.3 * predicted.peak_bytes
    assert any("expandable_segments" in note or "torch reserves" in note for note in made.notes)
    cpu = recoup.plan(model(), batch, budget="70%", device="cpu-generic")
    assert cpu.predicted.card_bytes == 0
    net, images = torch.nn.Conv2d(3, 4, 3).to("meta"), torch.empty(2, 3, 8, 8, device="meta")
    convolved = recoup.plan(net, images, budget="100%", device="h100-sxm", actions=())
    for notes, named in ((made.notes, False), (convolved.notes, True), (cpu.notes, False)):
        assert any("cuDNN" in note for note in notes) == named


def test_copies_that_a_kernel_makes_first_are_taken_before_its_results() -> None:
    x = torch.empty(2, 64, 512).transpose(1, 2)
    device = devices.get_device("h100-sxm")
    norm = make_signature(torch.ops.aten.native_layer_norm.default, (x, [64], None, None, 1e-5), {}, torch.empty(0))
    assert hidden_blocks(norm, device) == ((x.nbytes,), ())
    weights, image = torch.empty(8, 4, 2, 2), torch.empty(2, 4, 16, 16)
    gradient = torch.empty(2, 8, 8, 8).to(memory_format=torch.channels_last)
    for weight, copied in ((weights, gradient.nbytes), (weights.to(memory_format=torch.channels_last), image.nbytes)):
        args = (gradient, image, weight, [0], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
        found = make_signature(torch.ops.aten.convolution_backward.default, args, {}, torch.empty(0))
        assert hidden_blocks(found, device) == ((copied,), ())


def test_auto_is_what_torch_may_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.empty(65536, 1024, device="meta")
    plain = recoup.plan(model(), batch, budget="100%", device="t4", actions=())
    room = int(plain.predicted.card_bytes * 0.7)
    small = dataclasses.replace(devices.DEVICES["t4"], memory_bytes=room + devices.DEVICES["t4"].context_bytes)
    monkeypatch.setitem(devices.DEVICES, "t4", small)
    made = recoup.plan(model(), batch, budget="auto", device="t4")
    assert made.decisions and made.predicted.card_bytes <= room


def test_gradients_of_earlier_micro_batches_lie_on_the_card_too() -> None:
    net = model()
    batch = torch.empty(8, 1024, device="meta")
    peaks = [
        recoup.plan(net, batch, budget="100%", device="h100-sxm", accumulate=number).predicted.peak_bytes
        for number in (1, 2)
    ]
    weights = sum(p.nbytes for p in net.parameters())
    one_layer = 1024 * 1024 * 4
    # Of the first micro-batch's gradients none is there at first, of the second's all; then one more at a time.
    assert weights < peaks[0] - 65 * MIB < 2.1 * weights
    assert 0.9 * one_layer < peaks[1] - peaks[0] < 2 * one_layer


@pytest.mark.parametrize(("ends_before", "phase"), [(True, "backward"), (False, "backward"), (False, "forward")])
def test_a_sum_shares_the_block_of_what_ends_before_it(ends_before: bool, phase: Any) -> None:
    # Storage 0 is made by the first op, the second adds 1 to it, which makes storage 2.
    ops = [
        Op(signature=i, call=-1, origin=-1, phase=phase, replayed=False, inputs=inputs, outputs=outputs)
        for i, (inputs, outputs) in enumerate([((1,), (0,)), ((0, 1), (2,))])
    ]
    lives = ((0, 0 if ends_before else 1), (-1, 1), (1, 2))
    trace = SimpleNamespace(ops=ops, storages=[SimpleNamespace(alloc_op=a, free_op=b) for a, b in lives])
    assert _sums_in_place(trace) == ({2: 0} if ends_before else {})  # type: ignore[arg-type]
