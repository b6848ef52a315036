from __future__ import annotations

import dataclasses

import pytest

from recoup.cost.devices import DEVICES, get_device
from recoup.errors import UsageError

NEEDED = ("cpu-generic", "a100-80gb", "a100-40gb", "h100-sxm", "h200", "rtx-4090", "l4", "t4")
TEXT = {"name", "dialect", "source", "sources"}
NOT_ABOVE_ZERO = {"fixed_bytes", "context_bytes", "capability"}


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_has_a_source_and_makes_sense(name: str) -> None:
    device = DEVICES[name]
    numbers = {field.name for field in dataclasses.fields(device)} - TEXT
    sources = dict(device.sources)
    assert set(sources) == numbers and len(device.sources) == len(numbers)
    assert all(source.strip() for source in (*sources.values(), device.source))
    assert all(getattr(device, number) > 0 for number in numbers - NOT_ABOVE_ZERO)
    assert 1e9 < device.bandwidth_bytes < 1e13
    assert device.copy_bytes <= device.bandwidth_bytes
    assert device.fp16_flops >= device.fp32_flops
    assert 0 < device.attention_fraction <= device.matmul_fraction < 1
    assert 0 < device.bandwidth_fraction < 1
    assert 10 * 2**30 < device.memory_bytes < 200 * 2**30
    assert (device.capability is None) == (device.dialect == "cpu")
    if device.dialect == "cpu":
        assert (device.round_bytes, device.fixed_bytes) == (1, 0)
    else:
        assert device.round_bytes == 512
        assert device.fixed_bytes % 512 == 0 and device.fixed_bytes > 2**20


def test_the_table_has_what_was_promised() -> None:
    assert set(NEEDED) <= set(DEVICES)


def test_names_are_forgiving_and_wrong_ones_help() -> None:
    assert get_device(" H100-SXM ") is DEVICES["h100-sxm"]
    with pytest.raises(UsageError, match=r"Unknown device 'a100'.*a100-80gb.*Known: .*rtx-4090"):
        get_device("a100")
    with pytest.raises(UsageError, match="Known: ") as error:
        get_device("zzz")
    assert "Did you mean" not in str(error.value)
