"""Bytes alive after some calls of a module: only the beginning of a forward is run."""

from __future__ import annotations

from typing import Any

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.capture.capture import dialect_of, tracker_of, untouched_step
from recoup.capture.fakify import fake_batch, fake_parameters
from recoup.capture.island import Island
from recoup.capture.leaks import run_on_fakes
from recoup.capture.module_calls import CallRecorder
from recoup.capture.spec import StepSpec
from recoup.capture.watched_step import Failed, Unfollowable, device_of, register, run_step, saving
from recoup.errors import StepError


class _Enough(BaseException):
    """Ends a forward early. A BaseException, so that no `except Exception` of the model catches it."""


def levels_after_calls(spec: StepSpec, path: str, counts: tuple[int, ...]) -> list[int]:
    """Returns the bytes that are alive when the module at `path` was called so many times, with what is applied now.

    Only the forward up to there is run; the list is shorter if there are fewer calls.

    Args:
        counts: rising numbers of calls.

    Raises:
        StepError: if fake tensors cannot follow the step.
    """
    return run_on_fakes(lambda mode, _: _levels_on(mode, spec, path, counts), is_thorough=True)[0]


def _levels_on(mode: Any, spec: StepSpec, path: str, counts: tuple[int, ...]) -> list[int]:
    device = device_of(spec.model)
    levels: list[int] = []
    island = Island(device)
    with (
        untouched_step(spec) as before,
        _torch.quiet_fake_errors(),
        dialect_of(spec, device),
        mode,
        fake_parameters(spec.model, device, island) as parameters,
    ):
        tracker = tracker_of(spec, device, island, mode)
        register(spec.model, parameters, tracker)
        batch = fake_batch(spec.batch, device, island)
        for tensor in iterate_tensors(batch):
            tracker.add(tensor, "batch", "batch")
        recorder = CallRecorder(spec.model, tracker)
        num_calls = 0

        def watch(called: str, parent: int) -> None:
            nonlocal num_calls
            if called != path:
                return
            if num_calls > counts[-1]:
                raise _Enough  # again: an `except:` of the model has caught the first one
            if num_calls in counts:
                levels.append(sum(s.nbytes for s in tracker.storages if s.free_op < 0))
            num_calls += 1
            if num_calls > counts[-1]:
                raise _Enough

        recorder.watcher = watch
        try:
            with tracker, saving(tracker):
                run_step(spec.model, spec.objective, before, batch, tracker, recorder, backward=False)
        except _Enough:
            pass
        except (Unfollowable, Failed) as error:
            if num_calls <= counts[-1]:
                raise StepError(f"The step cannot be followed without data: {error}") from error
    return levels
