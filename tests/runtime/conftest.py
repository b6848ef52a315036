"""What tests of steps share."""

from __future__ import annotations

from typing import Any

import pytest

from recoup.runtime.rebuild.calls import Calls
from recoup.runtime.rebuild.step_run import StepRun


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step whether it followed a program to its end."""
    found: list[bool] = []
    real = Calls.end

    def end(self: Calls, key: Any, followed: Any) -> None:
        found.append(isinstance(followed, StepRun) and followed.is_done)
        real(self, key, followed)

    monkeypatch.setattr(Calls, "end", end)
    return found
