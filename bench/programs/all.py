"""The programs, kind by kind; `python -m bench.programs.all WORD` runs those whose kind or name has the word."""

from __future__ import annotations

import sys
import time

from bench.programs import forwards, layouts, loops, memory, models, more_models, parameters, state
from bench.programs.program import Program, outcome

PROGRAMS: list[Program] = [
    *state.PROGRAMS,
    *parameters.PROGRAMS,
    *forwards.PROGRAMS,
    *layouts.PROGRAMS,
    *memory.PROGRAMS,
    *loops.PROGRAMS,
    *models.PROGRAMS,
    *more_models.PROGRAMS,
]


def main() -> None:
    """Prints what becomes of each."""
    for program in PROGRAMS:
        if any(word in f"{program.kind}: {program.name}" for word in sys.argv[1:] or [""]):
            began = time.process_time()
            try:
                became = outcome(program)
            except Exception as error:
                became = f"raised {type(error).__name__}: {error}"
            print(f"{program.kind}: {program.name}: {became[:400]} [{time.process_time() - began:.1f} s]", flush=True)


if __name__ == "__main__":
    main()
