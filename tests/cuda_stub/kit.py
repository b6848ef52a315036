"""The stub's own module, where this process runs on it; elsewhere whatever imports this is skipped, with the reason."""

from __future__ import annotations

import pytest

_HOW = "`make check-cuda` builds it and runs this"
stub = pytest.importorskip("stub", reason=f"runs on the stub GPU alone: {_HOW}")
if not stub.is_active():
    pytest.skip(f"this process was not started by the stub's run.sh: {_HOW}", allow_module_level=True)
