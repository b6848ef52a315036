"""Values that a captured step knows: which way a model goes by its token ids and masks."""

from __future__ import annotations

import torch
from torch import nn

from recoup import _torch
from recoup.capture.capture import capture
from recoup.capture.island import UNKNOWN, Island
from recoup.capture.spec import StepSpec


class _Looks(nn.Module):
    """Branches, slices and indexes by values of its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)
        self.register_buffer("positions", torch.arange(64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = ids != 0
        assert isinstance(self.positions, torch.Tensor)
        x = self.embedding(ids) + self.embedding(self.positions[: ids.shape[1]])
        if not bool(mask.all()):
            x = x * 2
        lengths = mask.sum(1).tolist()
        rows = x[mask]
        x[~mask] = 0.0
        return self.head(rows)[: max(lengths)].sum() + x.sum()


def test_a_model_that_indexes_by_masks_of_its_ids_is_followed() -> None:
    ids = torch.randint(1, 50, (4, 12))
    ids[1, 8:] = 0
    trace = capture(StepSpec(model=_Looks(), batch=ids))
    assert trace.source == "fake"
    shapes = {spec.shape for s in trace.signatures for spec in s.args if hasattr(spec, "shape")}
    assert (4 * 12 - 4, 8) in shapes  # the rows of the tokens that are there


def _island_on_another_device() -> Island:
    """An island as on a GPU: its tensors are fake. Their device is the CPU's: a CPU build can fake no other."""
    island = Island("cpu")
    island._is_host = False
    return island


def test_fake_tensors_with_known_values_are_computed_with() -> None:
    island = _island_on_another_device()
    host = torch.tensor([[3, 0, 5], [1, 2, 0]])
    with _torch.fake_tensor_mode():
        ids = island.admit(host)
        row = ids[0]
        assert _torch.is_fake(ids) and island.knows([ids, row])
        largest = island.run(torch.ops.aten.max.default, (row,), {}, [row])
        found = island.run(torch.ops.aten._local_scalar_dense.default, (largest,), {}, [largest])
        assert found == 5
        again = island.run(torch.ops.aten.add_.Tensor, (row, 1), {}, [row])
        assert again is row  # in place: the same tensor, and what it is a view of has other values
        total = island.run(torch.ops.aten.sum.default, (ids,), {}, [ids])
        assert island.run(torch.ops.aten._local_scalar_dense.default, (total,), {}, [total]) == 14
        on_host = island.run(torch.ops.aten._to_copy.default, (ids,), {"device": torch.device("cpu")}, [ids])
    assert on_host.tolist() == [[4, 1, 6], [1, 2, 0]]


def test_values_are_forgotten_when_unknown_ones_are_written_over_them() -> None:
    island, host = _island_on_another_device(), torch.zeros(3, dtype=torch.long)
    with _torch.fake_tensor_mode():
        ids, other = island.admit(host), torch.empty(3, dtype=torch.long)
        assert not island.knows([ids, other])
        island.forget(torch.ops.aten.copy_.default, (ids, other), {})
        assert not island.knows([ids])


def test_large_results_of_known_values_are_not_computed() -> None:
    island, host = _island_on_another_device(), torch.zeros(100, dtype=torch.long)
    with _torch.fake_tensor_mode():
        ids = island.admit(host)
        assert island.run(torch.ops.aten.rsqrt.default, (ids,), {}, [ids]) is UNKNOWN
