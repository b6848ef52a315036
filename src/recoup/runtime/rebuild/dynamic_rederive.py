"""The program of steps whose sizes vary, under a plan that only rederives: see [Note: dynamic shapes]."""

from __future__ import annotations

from collections.abc import Sequence

from recoup.runtime.rebuild.dynamic_numbers import Differ
from recoup.runtime.rebuild.dynamic_program import Comparison
from recoup.runtime.rebuild.dynamic_shapes import Varied
from recoup.runtime.rebuild.step_program import REBUILD
from recoup.runtime.rebuild.values import Geometry
from recoup.runtime.rebuild.varied_ops import VariedOps


class RederiveComparison(Comparison):
    """Compares two programs of such a plan."""

    def _compare_rest(self) -> None:
        one, other = self._before, self._program
        if one.bases.keys() != other.bases.keys() or one.compacts.keys() != other.compacts.keys():
            raise Differ
        self._set(other, "bases", {number: self._common(one.bases[number], g) for number, g in other.bases.items()})
        kept = []
        for at, ((*mine, geometry, sources), (*theirs, of, from_these)) in enumerate(
            zip(one.kept, other.kept, strict=True)
        ):
            kind, number = theirs
            if mine != theirs or sources != from_these:
                raise Differ
            is_asked = number >= 0 or kind == REBUILD
            kept.append((kind, number, self._common_save(at, geometry, of) if is_asked else of, from_these))
        self._set(other, "kept", kept)
        compacts = {}
        for at, (number, dtype, base) in other.compacts.items():
            *before, was = one.compacts[at]
            if before != [number, dtype]:
                raise Differ
            found = self._common(was, base)
            lies_so = base[:3] == other.kept[at][2][:3] and (isinstance(was, Varied) or was[:3] == one.kept[at][2][:3])
            if isinstance(found, Varied) and not lies_so:
                raise Differ  # as nothing that is saved
            compacts[at] = number, dtype, found
        self._set(other, "compacts", compacts)
        self._compare_segments(one.rebuilding, other.rebuilding)

    def _is_kept_so(self, one: VariedOps, key: tuple[int, int], number: int, geometries: Sequence[Geometry]) -> bool:
        """As that of any program; it may be rebuilt for somebody else, too, as it lay."""
        bases = [self._before.bases[number], self._program.bases[number]]
        return super()._is_kept_so(one, key, number, geometries) and (bool(one.twins) or bases == [*geometries])
