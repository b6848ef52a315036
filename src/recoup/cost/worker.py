"""`python -m recoup.cost.worker`: measures the ops of a pickled `apart.Request` from stdin, a JSON line each."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
from typing import Any

import torch

from recoup.cost.apart import Request
from recoup.cost.measured import alone, measure_ops
from recoup.cost.op_memory import work_clock
from recoup.cost.op_replay import Arena


def main() -> None:
    """Measures until the time is up."""
    request = pickle.load(sys.stdin.buffer)
    assert isinstance(request, Request)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries that print do not do so among the lines
    request.flags.put()
    device = torch.device(request.device)
    arena = Arena(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the context is there before the time begins
    clock = work_clock(device)
    began = clock()
    deadline = began + request.seconds

    def say(**what: Any) -> None:
        out.write(json.dumps({**what, "spent": clock() - began}) + "\n")
        out.flush()

    with alone(device):
        for position, signature in enumerate(request.signatures):
            if clock() > deadline:
                break
            say(begins=position)
            for found in measure_ops([signature], arena, deadline).values():
                say(position=position, measured=None if found is None else dataclasses.asdict(found))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a context that an op has broken ends the process here
    say(done=True)


if __name__ == "__main__":
    main()
