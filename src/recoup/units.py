"""Bytes and seconds for people: `"8GiB"` and `"60%"` in, `"7.4 GiB"` and `"1.3 ms"` out.

GiB is 2**30 bytes, GB is 10**9; both are read, only GiB (and MiB, KiB) are written.
"""

from __future__ import annotations

import numbers
import re

from recoup.errors import UsageError

KIB, MIB, GIB, TIB = (1 << 10 * n for n in range(1, 5))
_SUFFIX_BYTES = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_BYTES = re.compile(r"^\s*([0-9]+(?:_[0-9]+)*\.?[0-9]*)\s*([a-z]*)\s*$", re.IGNORECASE)


def parse_bytes(text: str | int, *, takes_share: bool = False) -> int:
    """Returns the number of bytes `text` names.

    Args:
        text: an int (bytes), or a number with a unit: `"8GiB"`, `"750 MiB"`, `"80GB"`. `"8G"` is 8 GiB.
        takes_share: whether a percentage could stand there as well.

    Raises:
        UsageError: if it is not a positive number with a known unit.
    """
    if isinstance(text, bool) or not isinstance(text, (numbers.Integral, str)):
        raise UsageError(f"A budget is an int (bytes) or a string such as '8GiB' or '60%'; got {text!r}.")
    if not isinstance(text, str):
        value = int(text)
    else:
        match = _BYTES.match(text)
        if match is None or match.group(2).lower() not in _SUFFIX_BYTES:
            is_share = text.rstrip().endswith("%")
            share = "Percentages are of a plain step: only the `budget` of a plan may be one. " if is_share else ""
            raise UsageError(
                f"Cannot read {text!r} as a number of bytes. {share}Write a number and a unit: '8GiB', '750MiB', "
                "'80GB'."
            )
        number = float(match.group(1))
        size = number * _SUFFIX_BYTES[match.group(2).lower()]
        if size == float("inf"):
            raise UsageError(f"{text!r} is more bytes than there are. Write a number and a unit: '8GiB', '750MiB'.")
        value = int(size)
        if not match.group(2) and 0 < number < MIB:
            raise UsageError(_which_unit(text, number, takes_share=takes_share))
    if value <= 0:
        raise UsageError(f"A number of bytes must be positive; got {text!r}.")
    return value


def _which_unit(text: str, number: float, *, takes_share: bool) -> str:
    """Returns the question that a small number without a unit raises: a share, GiB, or bytes indeed?"""
    plain = text.strip()
    if number > 100:  # no share
        return f"{text!r}: bytes? Write '{plain}B', or a number and another unit: '8GiB', '750MiB'."
    if not takes_share:
        return f"{text!r}: bytes? Write a unit: '{plain}GiB'."
    percent = plain if number >= 1 else f"{100 * number:g}"
    return f"{text!r}: bytes or per cent? Write '{percent}%', or a unit: '{plain}GiB'."


def byte_unit(num_bytes: float) -> tuple[int, str]:
    """Returns the unit that suits a scale up to `num_bytes`, as (bytes, name): that of `format_bytes`."""
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= size:
            return size, name
    return 1, "B"


def parse_budget(
    budget: str | int,
    *,
    plain_peak_bytes: int,
    free_bytes: int | None = None,
    library_bytes: int = 0,
    minimum_bytes: int | None = None,
) -> int:
    """Returns the budget in bytes.

    Args:
        budget: bytes, `"8GiB"`, `"60%"` of the unplanned step's peak, `"min"`, or `"auto"`.
        plain_peak_bytes: the unplanned step's peak.
        free_bytes: what `"auto"` stands for (free on the device, less a margin); None where that is unknown.
        minimum_bytes: what `"min"` stands for: the smallest reachable peak; None where there is none.
        library_bytes: of the peak, what libraries take on a GPU whatever the step does; a percentage is of the rest.

    Raises:
        UsageError: if the text is none of these, or `"auto"` has nothing to ask.
    """
    if isinstance(budget, str) and budget.strip().lower() == "auto":
        if free_bytes is None:
            raise UsageError(
                "budget='auto' asks the device what is free, and this device cannot say. Give a number: '8GiB'."
            )
        return free_bytes
    if is_minimum(budget):
        if minimum_bytes is None:
            raise UsageError("budget='min' is for plans of a whole step. Give a number: '8GiB'.")
        return minimum_bytes
    if isinstance(budget, str) and budget.strip().endswith("%"):
        return library_bytes + int((plain_peak_bytes - library_bytes) * parse_percent(budget) / 100)
    return parse_bytes(budget, takes_share=True)


def parse_percent(text: str) -> float:
    """Returns the number before the percent sign; raises UsageError unless it is a positive number."""
    number = text.strip().removesuffix("%").strip()
    try:
        percent = float(number)
    except ValueError:
        raise UsageError(f"Cannot read {text!r} as a percentage. Write a number and a percent sign: '60%'.") from None
    if not 0 < percent < float("inf"):
        raise UsageError(f"A percentage must be positive; got {text!r}.")
    return percent


def check_budget(budget: str | int) -> None:
    """Raises UsageError if `budget` cannot be a budget; cheap, so that bad input is refused before any work."""
    if isinstance(budget, str):
        text = budget.strip().lower()
        if text in ("auto", "min"):
            return
        if text.endswith("%"):
            parse_percent(text)
            return
    parse_bytes(budget, takes_share=True)


def check_count(name: str, value: object) -> None:
    """Raises UsageError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1; got {value!r}.")


def is_minimum(budget: str | int) -> bool:
    """Whether the budget is the smallest that can be reached."""
    return isinstance(budget, str) and budget.strip().lower() == "min"


def format_at_least(num_bytes: int) -> str:
    """Returns the bytes rounded up, in a form that is read as a budget: `"285KiB"`."""
    unit, name = next((u, n) for u, n in ((MIB, "MiB"), (KIB, "KiB"), (1, "B")) if num_bytes >= 64 * u or u == 1)
    return f"{-(-num_bytes // unit)}{name}"


def format_bytes(num_bytes: int | float, unit: tuple[int, str] | None = None) -> str:
    """Returns e.g. `"7.41 GiB"`, `"512.0 MiB"`, `"3 B"`.

    Args:
        unit: (bytes, name) to write it in, as `byte_unit` gives it; the one that suits the number if left out. What
            is less than it shows is "< 0.1 MiB".
    """
    size, name = unit or byte_unit(abs(num_bytes))
    digits = {1: 0, KIB: 1, MIB: 1}.get(size, 2)
    least = 10.0**-digits
    if 0 < num_bytes < least * size / 2:
        return f"< {least:.{digits}f} {name}"
    return f"{num_bytes / size:.{digits}f} {name}"


def format_seconds(seconds: float) -> str:
    """Returns e.g. `"1.24 s"`, `"8.1 ms"`, `"35 us"`."""
    size = abs(seconds)
    if size >= 1:
        return f"{seconds:.2f} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def format_flops(flops: float) -> str:
    """Returns e.g. `"3.1 TFLOP"`, `"12.0 GFLOP"`."""
    for size, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if abs(flops) >= size:
            return f"{flops / size:.2f} {name}"
    return f"{int(flops)} FLOP"
