"""One plan for one stage of a pipeline, with its number of microbatches in flight: python examples/pipeline_stage.py

Under 1F1B, stage s of S holds the forwards of S - s microbatches before the first backward. Planned as one step that
runs so many forwards and the first of the backwards, the plan's peak is that of the schedule.
"""

import torch
from torch import nn

import recoup


class Stage(nn.Module):
    """The transformer blocks of one stage."""

    def __init__(self, width=32, depth=4):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(depth))

    def forward(self, x):
        """Maps [batch, time, width] to the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


class Beside(torch.autograd.Function):
    """Passes a tensor on; others wait beside it, with their graphs, until backward is through."""

    @staticmethod
    def forward(ctx, first, waiting):
        """Keeps what waits, and what backward begins at, which a schedule holds as well."""
        ctx.held = first, waiting
        return first.view_as(first)

    @staticmethod
    def backward(ctx, gradient):
        """Passes the gradient on, and keeps it: a schedule holds what it received for as long as backward runs."""
        ctx.received = gradient
        return gradient, None


def in_flight(stage, microbatches):
    """Runs every forward before the first backward; the gradient of the square is as large as what is sent back."""
    first, *waiting = [stage(x) for x in microbatches]
    return Beside.apply(first, waiting).square().mean()


def run_1f1b(stage, inputs, receive, num_in_flight):
    """Runs a stage's part of 1F1B: so many forwards, then a backward and a forward by turns, then backwards."""
    waiting, sent = [], iter(inputs)

    def backward():
        waiting.pop(0).backward(receive())
        next(sent).grad = None  # it is the stage's before by now

    for x in inputs:
        if len(waiting) == num_in_flight:
            backward()
        waiting.append(stage(x))
    while waiting:
        backward()


def plan_stage(stage, microbatch, num_in_flight, budget):
    """Returns the plan of a stage that holds so many microbatches at a time."""
    microbatches = [torch.randn_like(microbatch).requires_grad_() for _ in range(num_in_flight)]
    actions = ("recompute",)  # a plan by tensor numbers the ops of a whole step, and a microbatch is not one
    return recoup.plan(stage, microbatches, step=in_flight, accumulate=2, actions=actions, budget=budget)


def main():
    """Plans the first of three stages and trains six microbatches through it."""
    torch.manual_seed(0)
    stage, num_stages = Stage(), 3
    inputs = [torch.randn(8, 64, 32, requires_grad=True) for _ in range(6)]
    plan = plan_stage(stage, inputs[0], num_in_flight=num_stages, budget="60%")
    print(plan)
    with recoup.apply(stage, plan):
        run_1f1b(stage, inputs, lambda: torch.ones(8, 64, 32), num_stages)


if __name__ == "__main__":
    main()
