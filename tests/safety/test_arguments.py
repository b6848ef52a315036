"""Arguments of every kind: what a region is handed is handed to it again, whatever container it lies in."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import recoup
from recoup._pytree import flatten, iterate_tensors, map_tensors
from tests.safety.helpers import Block, Net, assert_trains_like, fakes_left, fit


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        self.rnn = nn.GRU(16, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 30)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.rnn(packed)
        return self.out(nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0])


class Inside(nn.Module):
    """Makes a nested tensor in its forward."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.up, self.layout = nn.Linear(8, 8), layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.as_nested_tensor(list(x.split([3, 5])), layout=self.layout)
        return torch.nested.to_padded_tensor(self.up(nested), 0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_inside_of_a_forward_is_named(layout: torch.layout) -> None:
    model, x = Inside(layout), torch.randn(8, 8)
    model(x).sum().backward()
    model.zero_grad()
    with pytest.raises(recoup.UsageError, match=r"makes a nested tensor .*padded"):
        recoup.profile(model, x)
    assert fakes_left() == 0


def test_a_packed_sequence() -> None:
    batch = (torch.randint(0, 30, (8, 6)), torch.randint(3, 7, (8,)))
    fitted = fit(Recurrent(), batch)
    assert fitted.evidence.exact, fitted.evidence.differences


@dataclasses.dataclass
class Masked:
    x: torch.Tensor
    mask: torch.Tensor

    def __post_init__(self) -> None:
        assert self.x.shape[0] == self.mask.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    name: str = dataclasses.field(default="n", init=False)


class Named(NamedTuple):
    x: torch.Tensor
    name: str = "n"


class Checked(dict[str, Any]):
    """A dict with a constructor of its own, and an attribute."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class Registered:
    def __init__(self, x: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor)
        self.x = x


_pytree.register_pytree_node(
    Registered, lambda r: ([r.x], None), lambda children, _: Registered(children[0]), serialized_type_name="Registered"
)


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Callable(Plain):
    def __call__(self, *names: str) -> list[Any]:
        return [getattr(self, name) for name in names]


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def checked(h: torch.Tensor) -> Checked:
    made = Checked(len(h))
    made["x"] = h
    return made


def set_attribute(a: Any, value: torch.Tensor) -> Any:
    a.x = value
    return a


def set_item(a: Any, value: torch.Tensor) -> Any:
    a["x"] = value
    return a


def attribute(a: Any) -> torch.Tensor:
    return a.x


def item(a: Any) -> torch.Tensor:
    return a["x"]


WRAPPERS: dict[str, tuple[Any, Any, Any]] = {
    "defaultdict": (lambda h: collections.defaultdict(list, x=h), item, set_item),
    "dict of its own kind": (checked, item, set_item),
    "UserDict": (lambda h: collections.UserDict(x=h), item, set_item),
    "dataclass that checks": (lambda h: Masked(h, h[:, 0].detach()), attribute, lambda a, v: Masked(v, a.mask)),
    "frozen dataclass": (Frozen, attribute, lambda a, v: Frozen(v)),
    "named tuple": (Named, attribute, lambda a, v: Named(v)),
    "registered with torch": (Registered, attribute, lambda a, v: Registered(v)),
    "object changed in place": (Plain, attribute, set_attribute),
    "callable object": (Callable, attribute, set_attribute),
    "object with slots": (Slots, attribute, set_attribute),
    "deque": (lambda h: collections.deque([h], 3), lambda a: a[0], lambda a, v: collections.deque([v], 3)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_region_gets_its_argument_again(name: str) -> None:
    wrap, get, put = WRAPPERS[name]

    class Wrapped(Block):
        def forward(self, a: Any) -> Any:
            return put(a, super().forward(get(a)))

    class Wrapping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = wrap(self.first(x))
            for block in self.blocks:
                a = block(a)
            return self.last(get(a))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Wrapping(Wrapped)

    model, batch = make(), (torch.randn(128, 8),)
    fitted = fit(model, batch, actions=("recompute",))
    assert fitted.evidence.exact, fitted.evidence.differences
    assert fitted.evidence.num_regions_replayed
    assert_trains_like(model, make(), batch)


def test_nests_are_taken_apart_and_put_together() -> None:
    tensors = [torch.ones(i + 1) for i in range(9)]
    a, b, c, d, e, f, g, h, i = tensors
    named = checked(c)
    named.more = d  # type: ignore[attr-defined]
    nest = [
        Named(a), Masked(b, b), named, collections.defaultdict(list, k=e), collections.UserDict(k=f),
        types.MappingProxyType({"k": g}), collections.deque([h, 1], 5), Registered(i), torch.ones(3).max(0),
        (), {"n": 1},
    ]  # fmt: skip
    leaves, structure = flatten(nest)
    again = structure.unflatten(leaves)
    assert list(map(type, again)) == list(map(type, nest))
    assert [id(t) for t in iterate_tensors(again)] == [id(t) for t in iterate_tensors(nest)]
    assert again[2] is not named
    assert (again[2].size, again[2].more) == (3, d)
    assert again[3].default_factory is list
    assert again[6].maxlen == 5
    doubled = map_tensors(lambda t: t * 2, nest)
    assert doubled[1].mask.sum() == 4
    assert doubled[10] is nest[10]  # nothing in it was changed
    assert nest[1].mask is b


def test_a_batch_encoding_keeps_its_class() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.zeros(2, 3)})
    assert type(map_tensors(lambda t: t + 1, batch)) is transformers.BatchEncoding
    output = transformers.modeling_outputs.CausalLMOutput(logits=torch.zeros(2))
    assert map_tensors(lambda t: t + 1, output).logits.sum() == 2
