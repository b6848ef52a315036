"""Plans for a card that is not here capture the ops it would dispatch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recoup import _torch
from recoup.capture.attention_choice import attention_kernel
from recoup.capture.autocast_lists import kernels as autocast_kernels
from recoup.capture.capture import capture
from recoup.capture.dialect import cuda_dialect
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.ir.decision import Rederive
from recoup.ir.trace import Trace
from recoup.runtime.apply import apply_decisions

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


def captured(model: nn.Module, batch: object, capability: tuple[int, int] = HOPPER) -> Trace:
    def loss(output: object, batch: object) -> torch.Tensor:
        return (output[0] if isinstance(output, tuple) else output).float().mean()

    trace = capture(
        StepSpec(
            model=model,
            batch=batch,
            objective=Objective(loss=loss),
            dialect="cuda",
            capability=capability,
            round_bytes=512,
        )
    )
    assert trace.source == "fake", trace.reason
    return trace


def ops(trace: Trace) -> set[str]:
    return {trace.signatures[o.signature].name.split(".")[1] for o in trace.ops}


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0, mask: bool = False) -> None:
        super().__init__()
        self.project, self.dropout, self.mask = nn.Linear(32, 96), dropout, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.mask else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not self.mask, dropout_p=self.dropout)


@pytest.mark.parametrize(
    ("capability", "dtype", "mask", "kernel"),
    [
        (HOPPER, torch.bfloat16, False, "cudnn"),
        (AMPERE, torch.bfloat16, False, "flash"),
        (AMPERE, torch.bfloat16, True, "efficient"),
        (HOPPER, torch.float32, False, "efficient"),
        (TURING, torch.float16, False, "efficient"),
        (TURING, torch.bfloat16, False, None),
    ],
)
def test_attention_by_card(
    capability: tuple[int, int], dtype: torch.dtype, mask: bool, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    found = ops(captured(Attention(mask=mask).to(dtype), torch.zeros(2, 64, 32, dtype=dtype), capability))
    fused = {name for name in found if name.startswith("_scaled_dot_product_") and "math" not in name}
    name = f"_scaled_dot_product_{kernel}_attention"
    assert fused == ({name, f"{name}_backward"} if kernel else set())
    assert ("_softmax" in str(found)) == (kernel is None)


def test_attention_stays_as_the_user_set_it() -> None:
    query = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta")
    choose = lambda: attention_kernel(  # noqa: E731
        query, query, query, None, dropout=0.0, causal=True, grouped=False, capability=AMPERE
    )
    assert choose() == "flash"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert choose() == "efficient"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert choose() == "math"


def test_dropout_keeps_a_mask_of_bytes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))
    trace = captured(model, torch.zeros(256, 64))
    assert {"native_dropout", "native_dropout_backward"} <= ops(trace)
    saved = [s.nbytes for s in trace.storages if s.category == "saved" and "native_dropout" in s.label]
    assert sorted(saved) == [256 * 64, 4 * 256 * 64]  # the mask; the result, for the next layer


def test_cudnn_batch_norm_and_its_rederiving() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    spec = StepSpec(model=model, batch=torch.zeros(4, 3, 32, 32), dialect="cuda", capability=HOPPER)
    assert {"cudnn_batch_norm", "cudnn_batch_norm_backward"} <= ops(capture(spec))
    with apply_decisions(model, (Rederive(path=""),)):
        trace = capture(spec)
    assert trace.num_rederived == 2  # for relu and for the convolution
    again = [trace.signatures[o.signature].name for o in trace.ops if o.replayed]
    assert any("cudnn_batch_norm" in name for name in again)
    assert "native_batch_norm" in ops(captured(model.bfloat16(), torch.zeros(4, 3, 32, 32).bfloat16()))


def test_max_pooling_keeps_its_own_indices() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    spec = StepSpec(model=model, batch=torch.zeros(4, 3, 34, 34), dialect="cuda", capability=HOPPER)
    with apply_decisions(model, (Rederive(path=""),)):
        trace = capture(spec)
    assert "gather" not in ops(trace)  # a shortcut of the CPU's


def test_rms_norm_is_one_op() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32)).bfloat16()
    found = ops(captured(model, torch.zeros(8, 32, dtype=torch.bfloat16)))
    assert {"_fused_rms_norm", "_fused_rms_norm_backward"} <= found and "rsqrt" not in found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_reserve_memory(kind: type[nn.RNNBase]) -> None:
    trace = captured(kind(16, 32, num_layers=2), torch.zeros(20, 4, 16))
    assert {"_cudnn_rnn", "_cudnn_rnn_backward"} <= ops(trace)
    saved = sum(s.nbytes for s in trace.storages if s.category == "saved")
    assert saved >= 4 * 20 * 4 * 32 * 2 * 2


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = self.norm(self.linear(x)).softmax(-1)
            return F.cross_entropy(self.linear(y), torch.zeros(len(x), dtype=torch.long))


def test_autocast_follows_the_lists_of_cuda() -> None:
    trace = captured(Autocast(), torch.zeros(8, 16))
    dtypes = {s.name.split(".")[1]: s.args[0].dtype for s in trace.signatures if s.args and hasattr(s.args[0], "dtype")}
    assert dtypes["addmm"] == "bfloat16"
    assert dtypes["native_layer_norm"] == dtypes["_softmax"] == dtypes["nll_loss_forward"] == "float32"
    assert dtypes["_log_softmax"] == "bfloat16"  # on the CPU cross entropy is cast as a whole


def test_nothing_is_left_behind() -> None:
    x = torch.ones(2, 2, 4, 8)
    plain = F.scaled_dot_product_attention(x, x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norm = F.layer_norm(x.bfloat16(), (8,)).dtype
    with cuda_dialect(HOPPER):  # real tensors get what they always get
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), plain)
        assert F.dropout(x, 0.5).count_nonzero() > 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert F.layer_norm(x.bfloat16(), (8,)).dtype == norm
    assert not {"aten::dropout", "aten::batch_norm"} & _torch.registered("AutogradCPU")
    assert "aten::layer_norm" not in _torch.registered("AutocastCPU")
    assert torch.amp.autocast_mode.autocast.__init__.__qualname__ == "autocast.__init__"


def test_every_list_is_known() -> None:
    """Each op that autocast knows for CUDA has a Python overload here, or the CPU treats it alike."""
    known = autocast_kernels()
    names = {op.name() for op in known}
    missing = _torch.registered("AutocastCUDA") - _torch.registered("AutocastCPU") - names
    assert not [m for m in missing if "Dimname" not in m]
