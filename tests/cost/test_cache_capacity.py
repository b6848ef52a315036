"""What of a last cache that others use too is left for a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recoup.cost import cache_capacity
from recoup.cost.cache_capacity import cache_capacity_bytes, find_capacity_bytes, flush_bytes
from recoup.cost.reuse import last_cache_bytes

MIB = 1 << 20


def reader(capacity_mib: int, *, warm: float = 1.0, cold: float = 2.5) -> tuple[Callable[[int], float], list[int]]:
    """Returns seconds of a read after so many bytes, of which a capacity evicts half and twice one all."""
    asked: list[int] = []

    def read_after(nbytes: int) -> float:
        asked.append(nbytes)
        gone = min(nbytes / (2 * capacity_mib * MIB), 1.0)
        return warm + gone * (cold - warm)

    return read_after, asked


@pytest.mark.parametrize("capacity", [25, 60, 110, 200, 240])
def test_the_share_of_a_shared_cache_is_found(capacity: int) -> None:
    read_after, asked = reader(capacity)
    found = find_capacity_bytes(read_after, least_bytes=8 * MIB, most_bytes=480 * MIB)
    assert found == pytest.approx(capacity * MIB, rel=0.1)
    assert sum(asked) <= 17 * 480 * MIB, "once for each machine, in two seconds"


def test_what_slows_single_reads_does_not_change_the_share() -> None:
    read_after, asked = reader(60)

    def disturbed(nbytes: int) -> float:
        return read_after(nbytes) * (3.0 if len(asked) % 3 == 0 else 1.0)

    found = find_capacity_bytes(disturbed, least_bytes=8 * MIB, most_bytes=480 * MIB)
    assert found == pytest.approx(60 * MIB, rel=0.1)


def test_the_whole_is_taken_where_reads_do_not_differ() -> None:
    read_after, _ = reader(60, cold=1.1)
    assert find_capacity_bytes(read_after, least_bytes=8 * MIB, most_bytes=480 * MIB) == 480 * MIB


def test_it_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "cache.txt"
    found = cache_capacity_bytes(path)
    assert 0 < found <= last_cache_bytes() and found <= flush_bytes(found) <= last_cache_bytes()
    monkeypatch.setattr(cache_capacity, "_measured_bytes", lambda: pytest.fail("measured again"))
    assert cache_capacity_bytes(path) == found


@pytest.mark.parametrize("text", ["", "many", "0", None])
def test_without_a_readable_file_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(cache_capacity, "_measured_bytes", lambda: 7)
    path = tmp_path / "cache.txt"
    if text is None:
        path.mkdir()  # nothing can be written there
    else:
        path.write_text(text)
    assert cache_capacity_bytes(path) == 7


def test_what_is_touched_leaves_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_capacity, "available_host_bytes", lambda: 40 * MIB)
    cache_capacity._measured_bytes.cache_clear()
    try:
        assert flush_bytes(cache_capacity_bytes(None)) <= 20 * MIB
    finally:
        cache_capacity._measured_bytes.cache_clear()
