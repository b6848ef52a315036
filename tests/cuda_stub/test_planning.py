"""Planning for the GPU of this machine: fake tensors alone, token ids known, ops measured elsewhere."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import recoup
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.devices import get_device
from recoup.cost.op_replay import make_call
from recoup.cost.roofline import RooflineCost
from recoup.errors import RealStepWarning
from recoup.ir.decision import Offload, Recompute
from recoup.ir.trace import TensorSpec
from recoup.runtime.apply import apply_decisions
from tests.cost.helpers import signature_of
from tests.cuda_stub.kit import stub
from tests.cuda_stub.models import perceptron, transformer


class _Looks(nn.Module):
    """A language model that branches and indexes by its ids, as padding and packing do."""

    def __init__(self, *, asks_activation: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.register_buffer("positions", torch.arange(128))
        self.asks_activation = asks_activation

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = ids != 0
        x = self.embedding(ids) + self.embedding(self.positions[: ids.shape[1]])
        if not mask.all():
            x = x * mask.unsqueeze(-1)
        lengths = mask.sum(1).tolist() + ids.cpu().numpy()[0, :1].tolist()
        scale = torch.arange(3, device=ids.device)
        scale[0] += 1
        if self.asks_activation:
            return self.head(
                x * 2 if x.sum().item() > 1e9 else x
            ).mean()  # masks tell nothing where values are not real
        return nn.functional.cross_entropy(self.head(x[mask]), labels[mask]) * int(scale.max()) * len(lengths)


def _ids() -> torch.Tensor:
    ids = torch.randint(1, 64, (4, 16))
    ids[1, 9:] = 0
    return ids


def test_ids_keep_their_values_and_no_step_is_run() -> None:
    ids = _ids()
    model, host = _Looks().cuda(), _Looks()
    spec = StepSpec(model=model, batch=(ids.cuda(), ids.cuda()), dialect="cuda", round_bytes=512)
    with stub.counting() as seen:
        trace = capture(spec)
    assert trace.source == "fake" and seen["launches"] <= 8  # of `torch.equal`, over buffers that are put back
    known = capture(StepSpec(model=host, batch=(ids, ids), dialect="cuda", round_bytes=512))
    assert max(trace.levels()) == pytest.approx(max(known.levels()), rel=0.02)


def test_a_real_step_is_never_run_silently() -> None:
    ids = _ids().cuda()
    with pytest.warns(RealStepWarning, match="item|data"):
        trace = capture(StepSpec(model=_Looks(asks_activation=True).cuda(), batch=(ids, ids), dialect="cuda"))
    assert trace.source == "real"


def test_ops_are_measured_in_another_process_attention_with_dropout_among_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RECOUP_CACHE_DIR", str(tmp_path))
    model, x = transformer(dropout=0.1), torch.zeros(8, 256, 128, device="cuda")
    with stub.counting() as seen:
        plan = recoup.plan(model, x, budget="80%", actions=("recompute",))
    assert seen["launches"] < 40  # of one small product, forward and backward, that shows what libraries take
    assert plan.predicted.cost_source.startswith("measured on") and "roofline" not in plan.predicted.cost_source
    assert plan.device == "cuda:0"


@pytest.mark.parametrize("kind", ["offload", "inputs"])
def test_what_offload_holds_on_the_device_is_predicted(kind: str) -> None:
    model, x = perceptron(), torch.zeros(4096, 512, device="cuda")
    decisions = [Offload(path=str(i)) if kind == "offload" else Recompute(path=str(i), offload=True) for i in range(4)]
    with apply_decisions(model, decisions):
        for _ in range(2):
            model(x).mean().backward()
            model.zero_grad(set_to_none=True)
        spec = StepSpec(
            model=model, batch=x, dialect="cuda", round_bytes=512, objective=Objective(loss=lambda out, _: out.mean())
        )
        predicted = max(capture(spec).levels())
        workspace = torch.cuda.memory_allocated() - sum(p.nbytes for p in model.parameters()) - x.nbytes
        torch.cuda.reset_peak_memory_stats()
        model(x).mean().backward()
    measured = torch.cuda.memory_stats()["active_bytes.all.peak"] - workspace
    assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_peak_of_accumulated_steps_is_predicted(micro_batches: int) -> None:
    gc.collect()  # of the tests before
    assert torch.cuda.memory_allocated() < 1 << 27, "cuBLAS's workspaces alone"
    model, x = perceptron(), torch.zeros(4096, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(micro_batches):
            model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = recoup.plan(
        model,
        x,
        budget="70%",
        loss=lambda out, _: out.mean(),
        optimizer=optimizer,
        accumulate=micro_batches,
        cost=RooflineCost(get_device("h100-sxm")),
    )
    with recoup.apply(model, plan):
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
    assert plan.predicted.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.01)
    assert plan.predicted.peak_bytes >= torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_plan_without_a_card_for_grouped_attention_in_half_precision(
    is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from transformers import masking_utils

    # Looks at the values of positions, which are not real here: all zero, it would mask sequences of one token.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 8192}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2, use_cache=False)
    ids, mask = torch.zeros(4, 1024, dtype=torch.long), torch.ones(4, 1024, dtype=torch.long)
    mask[:, :8] = 0
    batch = {"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if is_padded else {})
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    plan = recoup.plan(model, batch, budget="70%", device="h100-sxm", optimizer=torch.optim.AdamW)
    model = transformers.Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())
    with recoup.apply(model, plan):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() <= plan.predicted.peak_bytes
    assert plan.predicted.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.01)


def test_what_torch_has_reserved_is_free_to_a_plan() -> None:
    model, x = perceptron(), torch.zeros(256, 512, device="cuda")
    cost = RooflineCost(get_device("h100-sxm"))
    before = recoup.plan(model, x, budget="auto", cost=cost).budget_bytes
    cached = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    del cached
    assert torch.cuda.memory_reserved() > 8 << 30
    assert recoup.plan(model, x, budget="auto", cost=cost).budget_bytes == pytest.approx(before, rel=0.001)


def test_a_watched_batch_is_weighed_as_the_gpu_counts() -> None:
    model, x = transformer(), torch.zeros(2, 64, 128, device="cuda")
    spec = StepSpec(model=model, batch=(x,), dialect="cuda", round_bytes=512)
    peak = max(capture(spec).levels())
    with recoup.watch(model, budget=peak):
        model(x).sum().backward()
    with pytest.raises(recoup.BatchTooLarge), recoup.watch(model, budget=peak - 512):
        model(x)


def test_the_users_expandable_segments_are_what_a_plan_is_chosen_for() -> None:
    model, x = torch.nn.Linear(64, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
    table = RooflineCost(get_device("h100-sxm"))

    def note() -> str:
        plan = recoup.plan(model, x, budget="100%", device="cuda", cost=table, loss=lambda y, _: y.mean())
        return next(n for n in plan.notes if "torch reserves" in n)

    assert "that are set here" not in note()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        assert "that are set here" in note()
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_a_scalar_of_the_host_is_rebuilt_there() -> None:
    seen = []
    signature = signature_of(torch.ops.aten.add.Tensor, torch.rand(4), torch.zeros((), dtype=torch.long))
    spec = TensorSpec(shape=(), stride=(), dtype="int64", device="cpu")
    object.__setattr__(signature, "args", (signature.args[0], spec))
    call = make_call(signature, torch.device("cuda"))
    assert call is not None
    seen += [cell.cell_contents for cell in call.__closure__ or ()]
    args = next(c for c in seen if isinstance(c, list))
    assert [a.device.type for a in args] == ["cuda", "cpu"]
