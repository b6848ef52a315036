"""What autograd promises still holds under `rederive()`: errors, several passes, hooks, threads, FLOPs, no leaks."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.ir.decision import Decision, Recompute, Rederive, Save
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.lineage import current_recorder
from tests.collector import live_tensors, resting

from .test_rederive_ops import assert_same_bits


@pytest.fixture
def no_gc() -> Iterator[None]:
    with resting():
        yield


class Block(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.gate, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, s, d)))
        h = self.norm2(x)
        return x + self.dropout(self.down(F.silu(self.gate(h)) * self.up(h)))


class Transformer(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 4, vocab: int = 61) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


class Cnn(nn.Module):
    def __init__(self, channels: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(layers))
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(x.mean((2, 3)), 0.2)).logsumexp(-1).mean()


def transformer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Transformer(), torch.randint(0, 61, (3, 19))


def cnn() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Cnn(), torch.randn(3, 3, 26, 26)


def step(model: nn.Module, batch: Tensor, rederive: bool) -> list[Tensor | None]:
    """Returns loss, gradients and buffers after one step."""
    torch.manual_seed(1)
    if rederive:
        with recoup.rederive():
            loss = model(batch)
    else:
        loss = model(batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def rebuilt_by(run: Callable[[], object]) -> int:
    before = execution_context.counters()[1]
    run()
    return execution_context.counters()[1] - before


def both(run: Callable[[Callable[[Callable[[], Tensor]], Tensor]], list[Tensor | None]]) -> None:
    """Runs `run(forward)` plain and with the forward under `rederive()`; something must be rebuilt, bits equal."""

    def under(make: Callable[[], Tensor]) -> Tensor:
        with recoup.rederive():
            return make()

    torch.manual_seed(0)
    plain = run(lambda make: make())
    torch.manual_seed(0)
    before = execution_context.counters()[1]
    mine = run(under)
    assert execution_context.counters()[1] > before
    assert_same_bits(plain, mine)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (40, 40)), requires_grad=True)


# -- in-place changes -----


@pytest.mark.parametrize("where", ["source", "rebuilt", "view_of_source", "parameter"])
@pytest.mark.parametrize("inside", [True, False])
def test_change_after_saving_raises(where: str, inside: bool) -> None:
    """As plain does; a rebuilt tensor changed outside the block is seen too, or was rebuilt from what it was."""
    messages = []
    for rederive in (False, True):
        torch.manual_seed(0)
        x, weight = leaf(), nn.Parameter(torch.rand(40))
        source = x * 1

        def change(source: Tensor = source, weight: nn.Parameter = weight) -> None:
            with torch.no_grad():
                if where == "source":
                    source.add_(1)
                elif where == "view_of_source":
                    source[0].mul_(2)
                elif where == "rebuilt":
                    hidden.mul_(2)
                else:
                    weight.mul_(2)

        if rederive:
            with recoup.rederive():
                hidden = source * weight
                y = hidden * hidden
                if inside:
                    change()
        else:
            hidden = source * weight
            y = hidden * hidden
            if inside:
                change()
        if not inside:
            change()
        if rederive and where == "rebuilt" and not inside:
            # Nobody holds the tensor, so nobody can see its version; what is rebuilt is what was saved.
            y.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            y.sum().backward()
        messages.append(str(caught.value))
    assert all("modified by an inplace operation" in m for m in messages)


def test_source_overwritten_where_plain_does_not_care() -> None:
    """The saver of a source is not part of the backward pass: plain works, so must this."""

    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.rand(40))

        def make() -> Tensor:
            source = x * 1
            unused = source * weight
            y = torch.tanh(source * 2)
            z = y * y * weight
            with torch.no_grad():
                source.add_(1)
            del unused
            return z.sum()

        forward(make).backward()
        return [x.grad, weight.grad]

    both(run)


def test_source_written_through_data() -> None:
    """A write through `.data` leaves the version counter as it was: what was saved must be rebuilt all the same."""

    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.rand(40))

        def make() -> Tensor:
            source = x * 1
            z = torch.tanh(source * weight) ** 2
            source.data.zero_()
            return z.sum()

        forward(make).backward()
        return [x.grad, weight.grad]

    both(run)


def test_statistics_read_then_updated_by_the_same_batch_norm() -> None:
    """Evaluation, then training mode in one step: what is rebuilt reads the statistics as they were."""

    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        norm = nn.BatchNorm2d(4)
        x = torch.randn(4, 4, 12, 12, requires_grad=True)

        def make() -> Tensor:
            first = norm.eval()(x * 2).sigmoid()
            second = norm.train()(x * 3).sigmoid()
            return (first * first).sum() + (second * second).sum()

        forward(make).backward()
        return [x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]

    both(run)


def test_a_whole_loop_in_one_block() -> None:
    """The optimizer changes the parameters inside the block; later steps rebuild as much as the first."""
    counts, results = [], []
    for rederive in (False, True):
        model, batch = transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []

        def loop(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for _ in range(3):
                before = execution_context.counters()[1]
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                counts.append(execution_context.counters()[1] - before)

        torch.manual_seed(1)
        if rederive:
            with recoup.rederive():
                loop()
        else:
            loop()
        results.append([*losses, *model.parameters()])
    assert_same_bits(*results)
    assert counts[:3] == [0, 0, 0]
    assert counts[3] > 0 and counts[3] == counts[4] == counts[5]


# -- several passes, parts of the graph, derivatives of derivatives -----


@pytest.mark.parametrize("make", [transformer, cnn])
def test_retain_graph_twice(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        model, batch = make()
        loss = forward(lambda: model(batch))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    both(run)


def test_double_backward() -> None:
    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 40), nn.SiLU())
        x = leaf()

        def make() -> Tensor:
            y = model(x * 2)
            (slope,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
            return (slope.norm(dim=-1) - 1).square().sum() + y.sum()

        forward(make).backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    both(run)


def test_double_backward_outside_of_the_block() -> None:
    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.rand(40))
        y = forward(lambda: torch.exp(torch.sigmoid(x * weight) * x).sum())
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        second = torch.autograd.grad(slope.square().sum(), [x, weight], create_graph=True)
        third = torch.autograd.grad(second[0].sum(), [x, weight])
        return [slope.detach(), *(t.detach() for t in second), *third]

    both(run)


def test_gradcheck_of_second_order() -> None:
    weight = (torch.rand(30, dtype=torch.double) + 0.5).requires_grad_()

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with recoup.rederive():
            return F.silu(x * weight) * torch.tanh(x + weight)

    x = torch.randn(20, 30, dtype=torch.double, requires_grad=True)
    small = x.detach()[:1].clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, weight), fast_mode=True)
    assert torch.autograd.gradcheck(function, (small, weight))


def test_grad_of_a_part_of_the_graph() -> None:
    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.rand(40))
        kept: list[Tensor] = []

        def make() -> Tensor:
            middle = torch.sigmoid(x * weight)
            kept.append(middle)
            return (torch.tanh(middle * middle) * weight).sum()

        loss = forward(make)
        (part,) = torch.autograd.grad(loss, kept[0], retain_graph=True)
        (rest,) = torch.autograd.grad(kept[0], x, part, retain_graph=True)
        loss.backward(inputs=[weight])
        return [part, rest, weight.grad]

    both(run)


def test_part_of_the_graph_freed_first() -> None:
    """One consumer's nodes are gone, with what they kept, before the other one asks."""

    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.rand(40))
        losses: list[Tensor] = []

        def make() -> Tensor:
            hidden = torch.sigmoid(x * weight)
            losses.extend([(hidden.detach() * weight).exp().sum(), (hidden * hidden).sum()])
            losses.append((F.gelu(hidden) * weight).sum())
            return losses[0]

        forward(make)
        losses[0].backward()
        del losses[0]
        gc.collect()
        first = torch.autograd.grad(losses[0], [x, weight], retain_graph=True)
        del losses[0]
        return [*first, *torch.autograd.grad(losses[0], [x, weight])]

    both(run)


# -- hooks, anomaly mode, threads -----


def test_hooks_on_tensors_and_nodes() -> None:
    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.rand(40))
        seen: list[Tensor | None] = []

        def make() -> Tensor:
            hidden = torch.sigmoid(x * weight)
            hidden.register_hook(lambda grad: grad * 2)
            hidden.retain_grad()
            seen.append(hidden)
            y = hidden * hidden
            assert y.grad_fn is not None
            y.grad_fn.register_prehook(lambda grads: tuple(g + 1 for g in grads))
            return y.sum()

        forward(make).backward()
        assert isinstance(seen[0], Tensor)
        return [x.grad, weight.grad, seen[0].grad]

    both(run)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode() -> None:
    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        model, batch = transformer()
        with torch.autograd.detect_anomaly():
            forward(lambda: model(batch)).backward()
        return [p.grad for p in model.parameters()]

    both(run)


@pytest.mark.parametrize("make", [transformer, cnn])
@pytest.mark.parametrize("inside", [True, False])
def test_backward_on_another_thread(make: Callable[[], tuple[nn.Module, Tensor]], inside: bool) -> None:
    model, batch = make()
    expected = [t.clone() if t is not None else None for t in step(model, batch, False)]
    model, batch = make()
    rebuilt: list[int] = []

    def backward(loss: Tensor) -> None:
        def run() -> None:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()

        rebuilt.append(rebuilt_by(run))  # counted for the thread that ran forward

    torch.manual_seed(1)
    with recoup.rederive():
        loss = model(batch)
        if inside:
            backward(loss)
    if not inside:
        backward(loss)
    assert rebuilt[0] > 0
    assert_same_bits(expected, [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()])


def test_steps_on_several_threads() -> None:
    expected = step(*transformer(), False)
    found: list[list[Tensor | None]] = []
    models = [transformer() for _ in range(4)]
    lock = threading.Lock()

    def work(model: nn.Module, batch: Tensor) -> None:
        with lock, recoup.rederive():  # the random stream is shared by the threads, backward draws nothing
            torch.manual_seed(1)
            loss = model(batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])

    threads = [threading.Thread(target=work, args=pair) for pair in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for result in found:
        assert_same_bits(expected, result)


def test_nothing_under_no_grad() -> None:
    model, batch = transformer()
    with torch.no_grad(), recoup.rederive():
        assert current_recorder() is None
        assert rebuilt_by(lambda: model(batch)) == 0
    with recoup.rederive(), torch.no_grad():
        assert not model(batch).requires_grad
    with torch.inference_mode(), recoup.rederive():
        assert current_recorder() is None
        model(batch)


# -- cost -----


@pytest.mark.parametrize("make", [transformer, cnn])
def test_flops_are_those_of_plain(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    counts = []
    for rederive in (False, True):
        model, batch = make()
        with FlopCounterMode(display=False) as counter:
            step(model, batch, rederive)
        counts.append(counter.get_flop_counts()["Global"])
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) > 0


@pytest.mark.parametrize("make", [transformer, cnn])
@pytest.mark.parametrize("graph", ["freed", "retained", "never_differentiated"])
def test_no_leak_without_the_collector(make: Callable[[], tuple[nn.Module, Tensor]], graph: str, no_gc: None) -> None:
    model, batch = make()
    counts = []
    for _ in range(30):
        with recoup.rederive():
            loss = model(batch)
        if graph != "never_differentiated":
            loss.backward(retain_graph=graph == "retained")
        del loss
        counts.append(live_tensors())
    assert len(set(counts[1:])) == 1


def test_exception_in_the_block() -> None:
    model, batch = transformer()
    expected = [t.clone() if t is not None else None for t in step(model, batch, False)]

    class Failed(Exception):
        pass

    model, batch = transformer()
    with pytest.raises(Failed), recoup.rederive():
        model(batch)
        raise Failed
    assert current_recorder() is None
    with pytest.raises(RuntimeError), recoup.rederive():
        model.get_submodule("blocks.1")(torch.randn(2, 3, 7))
    assert current_recorder() is None
    assert_same_bits(expected, step(model, batch, True))


def test_exception_in_backward() -> None:
    x, weight = leaf(), nn.Parameter(torch.rand(40))

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("from a hook")

    with recoup.rederive():
        hidden = torch.sigmoid(x * weight)
        handle = hidden.register_hook(fail)
        loss = (hidden * hidden).sum()
    with pytest.raises(ValueError, match="from a hook"):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()
    expected = leaf()
    with torch.no_grad():
        expected.copy_(x)
    (torch.sigmoid(expected * weight.detach()) ** 2).sum().backward()
    assert_same_bits([expected.grad], [x.grad])


def test_nested_blocks() -> None:
    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.rand(40))

        def make() -> Tensor:
            first = torch.sigmoid(x * weight)
            second = forward(lambda: torch.tanh(first * first) * first)
            return (second * first).sum()

        forward(make).backward()
        return [x.grad, weight.grad]

    both(run)


def test_users_own_hooks_inside_and_outside() -> None:
    def run(forward: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor | None]:
        x, weight = leaf(), nn.Parameter(torch.rand(40))

        def make() -> Tensor:
            first = torch.sigmoid(x * weight)
            with torch.autograd.graph.save_on_cpu():
                second = torch.tanh(first * first) * first
            return (second * first * weight).sum()

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = forward(make)
        loss.backward()
        return [x.grad, weight.grad]

    both(run)


# -- with regions -----


def recompute(path: str, *, inside: str = "save", span: tuple[str, ...] = (), call: int | None = None) -> Decision:
    return Recompute(path=path, inside=inside, span=span, call=call)  # type: ignore[arg-type]


PLANS: dict[str, list[Decision]] = {
    "rederive": [Rederive(path="")],
    "rederive_but_one": [Rederive(path=""), Save(path="blocks.1")],
    "rederive_one": [Rederive(path="blocks.1")],
    "recompute": [recompute(f"blocks.{i}") for i in range(4)],
    "recompute_rederive": [recompute(f"blocks.{i}", inside="rederive") for i in range(4)],
    "both": [Rederive(path=""), *(recompute(f"blocks.{i}", inside="rederive") for i in (0, 2))],
    "span": [recompute("blocks.0", inside="rederive", span=("blocks.1", "blocks.2"))],
    "spans": [
        Rederive(path=""),
        recompute("blocks.0", inside="rederive", span=("blocks.1",)),
        recompute("blocks.2", inside="save", span=("blocks.3",)),
    ],
    "whole_model": [recompute("", inside="rederive")],
    "nested": [
        recompute("", inside="rederive"),
        *(recompute(f"blocks.{i}", inside="rederive") for i in range(4)),
    ],
    "nested_save": [
        recompute(""),
        recompute("blocks.1", inside="rederive"),
        recompute("blocks.3"),
        Rederive(path="blocks.2"),
    ],
    "nested_span": [
        recompute("blocks.0", inside="rederive", span=("blocks.1", "blocks.2")),
        recompute("blocks.1.norm2", inside="rederive"),
        Save(path="blocks.2.norm1"),
    ],
    "by_call": [Rederive(path=""), recompute("blocks.2", inside="rederive", call=0)],
}


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("make", [transformer, pytest.param(cnn, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", PLANS)
def test_with_regions(plan: str, make: Callable[[], tuple[nn.Module, Tensor]], around: bool) -> None:
    model, batch = make()
    expected = [t.clone() if t is not None else None for t in step(model, batch, False)]
    again = [t.clone() if t is not None else None for t in step(model, batch, False)]
    model, batch = make()
    uses_regions = any(d.is_region for d in PLANS[plan])
    rederives = around or any(d.rederives for d in PLANS[plan])
    before = execution_context.counters()
    with apply_decisions(model, PLANS[plan]):
        assert_same_bits(expected, step(model, batch, around))
        assert_same_bits(again, step(model, batch, around))
    after = execution_context.counters()
    assert (after[0] > before[0]) == uses_regions
    assert not rederives or after[1] > before[1] or (around and plan == "recompute")
    if not rederives:
        assert after[1] == before[1]


@pytest.mark.parametrize("make", [transformer, cnn])
@pytest.mark.parametrize("plan", ["nested_span", "nested", "spans", "both"])
@pytest.mark.slow
def test_no_leak_with_regions(plan: str, make: Callable[[], tuple[nn.Module, Tensor]], no_gc: None) -> None:
    model, batch = make()
    counts = []
    with apply_decisions(model, PLANS[plan]):
        for _ in range(30):
            step(model, batch, False)
            counts.append(live_tensors())
    assert len(set(counts[1:])) == 1


@pytest.mark.parametrize("plan", ["nested", "spans", "both", "rederive"])
def test_retain_graph_with_regions(plan: str) -> None:
    grads = []
    for decisions in ([], PLANS[plan]):
        model, batch = transformer()
        with apply_decisions(model, decisions):
            torch.manual_seed(1)
            loss = model(batch)
            loss.backward(retain_graph=True)
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert_same_bits(*grads)


class _TwoRows(nn.Module):
    """An embedding that is used twice, each time written first: its rows are scaled to a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 32, max_norm=1.0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.body(self.rows(ids)) + self.body(self.rows(ids.flip(0)))).square().mean()


def test_nothing_is_rederived_from_a_weight_that_the_forward_writes() -> None:
    torch.manual_seed(0)
    model, ids = _TwoRows(), torch.randint(0, 50, (64,))
    twin = copy.deepcopy(model)
    twin(ids).backward()
    with recoup.rederive():
        model(ids).backward()
    assert torch.equal(model.rows.weight, twin.rows.weight)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_inside_of_compiled_code_it_does_nothing() -> None:
    x, weight = torch.randn(64, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with recoup.rederive():
            return F.gelu(F.linear(x, weight)).square().mean()

    expected = torch.autograd.grad(loss(x, weight), (x, weight))
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for mine, theirs in zip(torch.autograd.grad(compiled(x, weight), (x, weight)), expected, strict=True):
        assert torch.equal(mine, theirs)
