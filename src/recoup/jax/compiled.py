"""What a compiler really keeps from forward to backward, read off the text of its scheduled program.

A value is kept if an instruction of forward makes it and one of backward reads it, as the names say that JAX gives to
ops (`transpose(` for backward). Values that a checkpoint names and the compiler computes twice anyway are not among
them; values that nobody named and that it merges with their second run are.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import jax
from recoup.jax._jax import compiled
from recoup.jax.inspection import Residual
from recoup.jax.planner import Candidate, Planner
from recoup.jax.rebuild import run
from recoup.jax.trace import gradient_function

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
_HANDS_ON = frozenset(("tuple", "bitcast", "copy", "opt-barrier"))
_FREE = frozenset(("parameter", "constant", "iota", "broadcast", "after-all", "partition-id", "replica-id"))
_BACKWARD = "transpose("
_HOST = "S(5)"  # the memory space that XLA gives to pinned host memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    op_name: str
    frame: str


def compiled_bytes(planner: Planner, candidate: Candidate) -> int:
    """Returns the temporaries of a candidate's step, compiled."""
    step = planner.step
    function = jax.jit(gradient_function(step, lambda values: run(step.program, candidate.layout, values)))
    return int(compiled(function, *step.avals).memory_analysis().temp_size_in_bytes)


def kept_for_backward(text: str) -> tuple[Residual, ...]:
    """Returns what a compiled loss-and-gradients program keeps for backward on the device, largest first.

    Args:
        text: what `jax.stages.Compiled.as_text()` returns.
    """
    instructions = {i.name: i for i in _entry(text)}
    kept: dict[str, _Instruction] = {}
    for reader in instructions.values():
        if reader.opcode in _HANDS_ON or _BACKWARD not in reader.op_name:
            continue
        for operand in reader.operands:
            for made in _makers(instructions, operand):
                if _BACKWARD not in made.op_name and made.opcode not in _FREE and _HOST not in made.shape:
                    key = f"{made.operands}{made.name}" if made.opcode != "get-tuple-element" else made.name
                    kept.setdefault(key, made)
    places = _places(text)
    found = [
        Residual(
            nbytes=_nbytes(i.shape),
            shape=re.sub(r"\{.*", "", i.shape),
            op=i.op_name.rsplit("/", 1)[-1] or i.opcode,
            name="",
            source=places.get(i.frame, ""),
        )
        for i in kept.values()
    ]
    return tuple(sorted(found, key=lambda r: (-r.nbytes, r.shape, r.op)))


def _entry(text: str) -> Iterator[_Instruction]:
    """Yields the instructions of the program itself, in order; one without a name has its first operand's."""
    names: dict[str, str] = {}
    is_inside = False
    for line in text.splitlines():
        if line.startswith("ENTRY "):
            is_inside = True
        elif is_inside and line.startswith("}"):
            return
        match = _INSTRUCTION.match(line) if is_inside else None
        if match is None:
            continue
        name, shape, opcode, rest = match.groups()
        operands = tuple(re.findall(r"%([\w.\-]+)", re.split(r"\)(?:,|$)", rest, maxsplit=1)[0]))
        named = re.search(r'op_name="([^"]*)"', rest)
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        names[name] = named[1] if named else names.get(operands[0], "") if operands else ""
        yield _Instruction(
            name=name,
            shape=shape,
            opcode=opcode,
            operands=operands,
            op_name=names[name],
            frame=frame[1] if frame else "",
        )


def _makers(instructions: dict[str, _Instruction], name: str) -> Iterator[_Instruction]:
    """Yields the ops that make the arrays behind a name, following tuples, views and copies."""
    made = instructions.get(name)
    if made is None:
        return
    if made.opcode in _HANDS_ON or (made.opcode == "get-tuple-element" and _hands_on(instructions, made)):
        operands = made.operands
        if made.opcode == "get-tuple-element":
            operands = (made.operands[0],)
        for operand in operands:
            yield from _makers(instructions, operand)
    else:
        yield made


def _hands_on(instructions: dict[str, _Instruction], made: _Instruction) -> bool:
    source = instructions.get(made.operands[0])
    return source is not None and source.opcode in _HANDS_ON


def _nbytes(shape: str) -> int:
    """Returns the bytes of an array or of a tuple of arrays."""
    total = 0
    for kind, bits, dims in _ARRAY.findall(shape):
        width = {"pred": 8, "token": 0}.get(kind, int(bits or 0))
        total += math.prod(int(d) for d in dims.split(",") if d) * width // 8
    return total


def _places(text: str) -> dict[str, str]:
    """Returns the line behind each stack frame's number, where the compiler wrote the tables down."""
    tables: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif line.startswith(("%", "ENTRY")):
            break
        elif match := re.match(r"^(\d+) (.*)$", line):
            table[match[1]] = match[2].strip('"')

    def value(row: str, key: str) -> str:
        found = re.search(rf"{key}=(\d+)", row)
        return found[1] if found else ""

    places = {}
    for number, row in tables.get("StackFrames", {}).items():
        place = tables.get("FileLocations", {}).get(value(row, "file_location_id"), "")
        file = tables.get("FileNames", {}).get(value(place, "file_name_id"), "")
        function = tables.get("FunctionNames", {}).get(value(place, "function_name_id"), "")
        places[number] = f"{file}:{value(place, 'line')} ({function})" if file else ""
    return places
