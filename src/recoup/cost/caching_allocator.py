"""PyTorch's CUDA caching allocator, by the sizes alone: what a sequence of allocations takes from a card. No torch.

The allocator takes segments from the card (2 MiB for blocks of up to 1 MiB, 20 MiB for blocks below 10 MiB, else what
is asked for in steps of 2 MiB) and cuts blocks from them, the smallest free one that fits first; a large block is cut
only if more than 1 MiB remains. What is freed joins its free neighbours and stays with the process. So a step needs
more of a card than its tensors hold: *reserved* bytes, and *allocated* ones count the remainders of uncut blocks.
With expandable segments a pool is one range of addresses that grows by pages of 2 or 20 MiB, and nothing is left over
at the ends of segments.

At its limit the allocator gives back what is free as a whole (segments, or pages) and tries again; `OutOfCard` is where
PyTorch raises `OutOfMemoryError`. Compared with the real one of torch 2.11, event by event, on the stub GPU. Not
simulated: several streams, whose blocks are not shared, and the addresses of segments, which break ties.
"""

from __future__ import annotations

from bisect import bisect_left, insort

# Of c10/core/AllocatorConfig.h, as torch 2.13 has them.
MIN_BLOCK_BYTES = 512  # kMinBlockSize: sizes are rounded up to it
_SMALL_BYTES = 1 << 20  # kSmallSize: larger blocks lie in segments of their own kind
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer; larger segments are a whole number of these, too (kRoundLarge)
_LARGE_SEGMENT_BYTES = 20 << 20  # kLargeBuffer
_EXPANDABLE_SEGMENT_BYTES = 1 << 50  # ours, of addresses: more than any card has, and keys have room for it
_OWN_SEGMENT_BYTES = 10 << 20  # kMinLargeAlloc: from here on a block has a segment to itself


class OutOfCard(Exception):
    """The limit is too small for the next allocation, by `missing_bytes`."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(missing_bytes)
        self.missing_bytes = missing_bytes


class Block:
    """A piece of a segment. `is_mapped`: the card's memory is behind it (always, but in expandable segments)."""

    __slots__ = ("address", "before", "is_free", "is_mapped", "next", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.is_free = True
        self.is_mapped = True
        self.before: Block | None = None
        self.next: Block | None = None


class _Pool:
    """Free blocks of one kind, by size and address: `keys` in order, and the block of each key.

    Attributes:
        least_rest_bytes: of a free block that is larger than what is asked for, the least that is cut off.
    """

    __slots__ = ("blocks", "first", "is_small", "keys", "least_rest_bytes", "page")
    address_bits = 62  # of a key, the rest is the size; addresses begin at 1 << 60

    def __init__(self, *, is_small: bool, expandable: bool) -> None:
        self.is_small = is_small
        self.page = SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT_BYTES
        self.least_rest_bytes = MIN_BLOCK_BYTES if is_small or expandable else _SMALL_BYTES + 1
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.first: Block | None = None  # of the expandable segment

    def add(self, block: Block) -> None:
        key = block.size << self.address_bits | block.address
        self.blocks[key] = block
        insort(self.keys, key)

    def remove(self, block: Block) -> None:
        key = block.size << self.address_bits | block.address
        del self.blocks[key]
        del self.keys[bisect_left(self.keys, key)]


class CachingAllocator:
    """Allocates sizes as PyTorch would on one stream.

    Args:
        limit_bytes: of what may be reserved.
        expandable: with expandable segments.
        ascending: whether a new segment lies above those before it, which decides between free blocks of one size; the
            driver does not say.

    Attributes:
        allocated_bytes, reserved_bytes: as `torch.cuda.memory_allocated` and `memory_reserved` tell; with `peak_`, the
            most they were.
    """

    def __init__(self, *, limit_bytes: int | None = None, expandable: bool = False, ascending: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.ascending = ascending
        self.expandable = expandable
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._pools = tuple(_Pool(is_small=is_small, expandable=expandable) for is_small in (True, False))
        self._next_address = 1 << 60
        self._missing_bytes = 0

    def free_places(self) -> list[list[int]]:
        """Returns size and address of each free block: with the blocks in use, the allocator's whole state."""
        return [list(pool.keys) for pool in self._pools]

    def allocate(self, nbytes: int) -> Block:
        """Returns a block for so many bytes.

        Raises:
            OutOfCard: if the limit does not allow it.
        """
        size = -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES
        pool = self._pools[size > _SMALL_BYTES]
        keys = pool.keys
        at = self._find(pool, size) if self.expandable else bisect_left(keys, size << pool.address_bits)
        block = pool.blocks.pop(keys.pop(at)) if at < len(keys) else self._grow_or_fail(pool, size)
        if block.size - size >= pool.least_rest_bytes:
            pool.add(_cut(block, size))
        block.is_free = False
        self.allocated_bytes = allocated_bytes = self.allocated_bytes + block.size
        if allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated_bytes
        return block

    def pass_through(self, nbytes: int) -> None:
        """Allocates `nbytes` and frees them at once.

        Raises:
            OutOfCard: if the limit does not allow it.
        """
        size = -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES
        pool = self._pools[size > _SMALL_BYTES]
        at = self._find(pool, size)
        if at == len(pool.keys):
            self.free(self.allocate(nbytes))
            return
        # The block is cut and joined again: all lies as it did.
        found = pool.blocks[pool.keys[at]].size
        taken = size if found - size >= pool.least_rest_bytes else found
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes + taken)

    def free(self, block: Block) -> None:
        """Gives a block back to its pool."""
        self.allocated_bytes -= block.size
        block.is_free = True
        before, after = block.before, block.next
        if (after is None or not after.is_free) and (before is None or not before.is_free):
            block.pool.add(block)
        else:
            self._pool_up(block)

    def empty_cache(self) -> None:
        """Returns wholly free segments (of expandable segments, wholly free pages) to the card."""
        for pool in self._pools:
            for block in [pool.blocks[key] for key in pool.keys]:
                if self.expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    # -- blocks -------------------------------------------------------------------------------------------------

    def _find(self, pool: _Pool, size: int) -> int:
        """Returns the position of the smallest free block that fits; one that can grow counts as fully grown."""
        keys = pool.keys
        at = bisect_left(keys, size << pool.address_bits)
        if self.expandable:
            while at + 1 < len(keys) and _reach(pool.blocks[keys[at + 1]]) < _reach(pool.blocks[keys[at]]):
                at += 1
        return at

    def _pool_up(self, block: Block) -> None:
        """Joins a free mapped block with its free neighbours and adds it to its pool."""
        before, after, pool = block.before, block.next, block.pool
        if after is not None and after.is_free and after.is_mapped:
            pool.remove(after)
            _join(block)
        if before is not None and before.is_free and before.is_mapped:
            pool.remove(before)
            _join(before)
            block = before
        pool.add(block)

    # -- segments -----------------------------------------------------------------------------------------------

    def _grow_or_fail(self, pool: _Pool, size: int) -> Block:
        block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            block = self._grow(pool, size)
        if block is None:
            raise OutOfCard(self._missing_bytes)
        return block

    def _grow(self, pool: _Pool, size: int) -> Block | None:
        """Returns a block that is in no pool, of memory newly taken from the card; None at the limit."""
        if pool.is_small:
            wanted = SMALL_SEGMENT_BYTES
        else:
            own = -(-size // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
            wanted = _LARGE_SEGMENT_BYTES if size < _OWN_SEGMENT_BYTES else own
        if self._is_beyond(wanted):
            return None
        if self.expandable:
            return self._expand(pool, size)
        self._take(wanted)
        return Block(self._place(wanted), wanted, pool)

    def _is_beyond(self, nbytes: int) -> bool:
        """Whether so many bytes more are above the limit; then it is known how many are missing."""
        self._missing_bytes = 0 if self.limit_bytes is None else self.reserved_bytes + nbytes - self.limit_bytes
        return self._missing_bytes > 0

    def _place(self, nbytes: int) -> int:
        """Returns the address of a new segment."""
        if self.ascending:
            self._next_address += nbytes + SMALL_SEGMENT_BYTES
            return self._next_address - nbytes
        self._next_address -= nbytes + SMALL_SEGMENT_BYTES
        return self._next_address

    def _take(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Maps pages behind the first place of the segment with room for `size`."""
        if pool.first is None:
            pool.first = Block(self._place(_EXPANDABLE_SEGMENT_BYTES), _EXPANDABLE_SEGMENT_BYTES, pool)
            pool.first.is_mapped = False
        block: Block | None = pool.first
        while block is not None:
            if block.is_free and not block.is_mapped:
                before = block.before
                start = before if before is not None and before.is_free and before.is_mapped else block
                if _room(start) >= size:
                    return self._map(pool, start, size)
            block = block.next
        return None

    def _map(self, pool: _Pool, start: Block, size: int) -> Block | None:
        if start.is_mapped:
            pool.remove(start)
        while not start.is_mapped or start.size < size:
            page = start if not start.is_mapped else start.next
            assert page is not None
            if page.is_mapped:  # free pages behind the gap
                pool.remove(page)
            else:
                have = 0 if page is start else start.size
                wanted = min(-(-(size - have) // pool.page) * pool.page, page.size)
                if self._is_beyond(wanted):
                    if start.is_mapped:
                        self._pool_up(start)
                    return None
                self._take(wanted)
                if page.size > wanted:
                    _cut(page, wanted)
                page.is_mapped = True
            if page is not start:
                _join(start)
        if start.next is not None and start.next.is_free and start.next.is_mapped:
            pool.remove(start.next)
            _join(start)
        return start

    def _unmap(self, pool: _Pool, block: Block) -> None:
        assert pool.first is not None
        origin, page = pool.first.address, pool.page
        begin = -(-(block.address - origin) // page) * page + origin
        end = (block.address + block.size - origin) // page * page + origin
        if end <= begin:
            return
        pool.remove(block)
        middle = block
        if begin > block.address:
            middle = _cut(block, begin - block.address)
            pool.add(block)
        if end < middle.address + middle.size:
            pool.add(_cut(middle, end - begin))
        middle.is_mapped = False
        self.reserved_bytes -= middle.size
        if middle.next is not None and not middle.next.is_mapped:
            _join(middle)
        if middle.before is not None and not middle.before.is_mapped:
            _join(middle.before)


def _cut(block: Block, size: int) -> Block:
    """Cuts a block to a size; returns the rest, free like the block."""
    rest = Block(block.address + size, block.size - size, block.pool)
    after = block.next
    rest.before, rest.next = block, after
    if after is not None:
        after.before = rest
    block.next, block.size, rest.is_mapped = rest, size, block.is_mapped
    return rest


def _join(block: Block) -> None:
    """Takes the next block into this one."""
    rest = block.next
    assert rest is not None
    block.size += rest.size
    block.next = rest.next
    if rest.next is not None:
        rest.next.before = block


def _reach(block: Block) -> int:
    """Returns the bytes of a block and of the addresses without memory behind it."""
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.is_mapped else 0)


def _room(start: Block) -> int:
    """Returns the bytes of free memory and of addresses without memory from a block on."""
    total = 0
    block: Block | None = start
    while block is not None and block.is_free:
        total += block.size
        block = block.next
    return total
