"""validate, gen-tests, bench, advise on a small target, by the command line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import recoup
from recoup.cli.main import run
from recoup.ir.decision import Decision, LossInPlace, Rebuild, Recompute, Rederive, TileLoss
from recoup.selective.advise import advise

SOURCE = """
import torch

def target(batch=256):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(
        torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
        for _ in range(6)
    ))
    return dict(model=model, batch=torch.randn(batch, 32), loss=lambda o, b: o.square().mean())

def heavy():
    return dict(model=torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(4))), batch=torch.randn(2, 400))
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.slow
def test_validate_passes_and_fails_with_its_exit_code(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", source, "--json", "-q"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["ok"] and len(done["gates"]) == 8
    assert run(["validate", f"{source}:heavy", "-q", "--strategies", "full"]) == 1
    assert "FAIL  memory" in capsys.readouterr().out


@pytest.mark.slow
def test_generated_tests_run_and_pass(source: str, tmp_path: Path) -> None:
    out = tmp_path / "test_mine.py"
    assert run(["gen-tests", source, "--out", str(out), "--strategies", "full,sequential"]) == 0
    assert run(["gen-tests", source, "--out", str(out)]) == 2
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(out)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


@pytest.mark.slow
def test_bench_prints_each_strategy_and_size(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", source, "--batches", "64,256", "--strategies", "full,rederive", "--json", "-q"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["strategy"] for r in rows] == ["full", "rederive"] * 2
    assert all(r["gradients_equal"] and r["peak_bytes"] < r["plain_peak_bytes"] for r in rows)
    assert rows[0]["recomputed_flops"] > 0 and rows[1]["recomputed_flops"] < rows[0]["recomputed_flops"]


@pytest.mark.parametrize(
    ("budget", "words"),
    [("1GiB", "not needed"), ("70%", "needed: the plain step peaks"), ("1KiB", "none reaches it: Budget 1.0 KiB")],
)
def test_advice_comes_from_the_numbers(
    source: str, capsys: pytest.CaptureFixture[str], budget: str, words: str
) -> None:
    assert run(["advise", source, "--budget", budget, "-q", "--device", "cpu-generic"]) == 0
    text = capsys.readouterr().out.strip()
    assert words in text and 2 <= len(text.splitlines()) <= 5


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        ((Rederive(path=""),), "rederiving is enough"),
        ((Recompute(path="0"), Recompute(path="1")), "recompute 2 regions of the Sequential"),
        ((Rederive(path=""), Recompute(path="0")), "recompute 1 region of the Sequential, and rederive cheap ops"),
        ((Rebuild(path=""),), "rebuild by running ops again, in 0 segments"),
        ((TileLoss(path="5"),), "tile 5 and its loss"),
        (
            (LossInPlace(path="", rows=8), Rebuild(path="")),
            "rebuild by running ops again, in 0 segments, and take the loss 8 rows",
        ),
    ],
)
def test_advice_names_what_the_plan_does(
    monkeypatch: pytest.MonkeyPatch, decisions: tuple[Decision, ...], words: str
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
    plan = recoup.plan(model, torch.randn(64, 32), budget="100%", device="cpu-generic")
    monkeypatch.setattr(recoup.Frontier, "plan", lambda *_: dataclasses.replace(plan, decisions=decisions))
    which = advise(model, torch.randn(64, 32), budget="70%", device="cpu-generic").splitlines()[1]
    assert which.removeprefix("which").strip().startswith(words)
    assert ("no matmul" in which) == (words == "rederiving is enough")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate", "{source}", "--strategies", "foo"], "Unknown strategy 'foo'"),
        (["bench", "{source}", "--batches", "two"], "--batches 'two'"),
        (["estimate", "gpt-9"], "Unknown model 'gpt-9'"),
        (["gen-tests", "missing.py"], "No file"),
        (["advise", "{source}", "--budget", "much"], "'much'"),
    ],
)
def test_bad_arguments_are_one_line(
    source: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run([a.format(source=source) for a in arguments] + ["-q"]) == 2
    assert message in capsys.readouterr().err
