"""The command line: exit codes, one line for bad input, data on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recoup.cli.main import run
from recoup.planner.strategies.registry import DEFAULT_ACTIONS, OPT_IN_ACTIONS

SOURCE = """
import torch

def target():
    model = torch.nn.Sequential(*(
        torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        for _ in range(4)
    ))
    return dict(model=model, batch=torch.randn(512, 64), loss=lambda o, b: o.square().mean())

def no_gradient():
    return dict(model=torch.nn.Linear(4, 4), batch=torch.randn(2, 4), loss=lambda o, b: o.detach().sum())

def no_scalar():
    return dict(model=torch.nn.Linear(4, 4), batch=torch.randn(2, 4), loss=lambda o, b: o)

def no_parameters():
    return dict(model=torch.nn.ReLU(), batch=torch.randn(2, 4))

def wrong_batch():
    return dict(model=torch.nn.Linear(4, 4), batch=torch.randn(2, 5))

def no_dict():
    return 3

def given(**more):
    return {"model": torch.nn.Linear(4, 4), "batch": torch.randn(2, 4), **more}

def two_losses(): return given(loss=lambda o, b: o.sum(), step=lambda m, b: m(b).sum())
def a_number(): return given(loss=3)
def a_word(): return given(autocast="bf16", loss=lambda o, b: o.sum())
def nothing_to_add(): return given(accumulate=0)
def no_scaler(): return given(scaler=2.0)
def targets_alone(): return given(targets=torch.ones(2))
def unknown_key(): return given(model_name="x")
def no_module(): return given(model="gpt2")
def a_loader(): return given(batch=torch.utils.data.DataLoader(torch.randn(8, 4)))
def lazy(): return given(model=torch.nn.LazyLinear(4))
def no_batch(): return {"model": torch.nn.Linear(4, 4)}
def raises(): raise ValueError("no data here")
ready = torch.nn.Linear(4, 4)
def ends(): raise SystemExit(0)
def ends_in_forward(): return given(loss=lambda o, b: exit(3))
def needs(rows): return given()
def frozen(): return given(model=torch.nn.Linear(4, 4).requires_grad_(False))
def talks():
    print("made by the target")
    return given(loss=lambda o, b: o.sum())
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("missing.py", ["--budget", "1GiB"], "No file"),
        ("{source}:nothing", ["--budget", "1GiB"], "No function 'nothing'"),
        ("hf:gtp2", ["--budget", "1GiB"], "Did you mean gpt2"),
        ("{source}", ["--budget", "8 bananas"], "8 bananas"),
        ("{source}", ["--budget", "60%", "--device", "h9000"], "Unknown device"),
        ("{source}", ["--budget", "60%", "--actions", "magic"], "Unknown action"),
        ("{source}:no_gradient", ["--budget", "60%"], "no gradient"),
        ("{source}:no_scalar", ["--budget", "60%"], "must be a scalar"),
        ("{source}:no_parameters", ["--budget", "60%"], "has no parameters"),
        ("{source}:wrong_batch", ["--budget", "60%"], "failed on this batch"),
        ("{source}:no_dict", ["--budget", "60%"], "must return a dict"),
        ("{source}:two_losses", ["--budget", "60%"], "not both"),
        ("{source}:a_number", ["--budget", "60%"], "function of"),
        ("{source}:a_word", ["--budget", "60%"], "torch.bfloat16"),
        ("{source}:nothing_to_add", ["--budget", "60%"], "micro-batches"),
        ("{source}:no_scaler", ["--budget", "60%"], "GradScaler"),
        ("{source}:targets_alone", ["--budget", "60%"], "needs inputs"),
        ("{source}:unknown_key", ["--budget", "60%"], "'model_name'"),
        ("{source}:no_module", ["--budget", "60%"], "torch.nn.Module"),
        ("{source}:a_loader", ["--budget", "60%"], "next(iter(loader))"),
        ("{source}:lazy", ["--budget", "60%"], "lazy module"),
        ("{source}:no_batch", ["--budget", "60%"], "without 'batch'"),
        ("{source}:raises", ["--budget", "60%"], "no data here"),
        ("{source}:frozen", ["--budget", "60%"], "unfreeze"),
        ("{source}:ends", ["--budget", "60%"], "__main__"),
        ("{source}:ends_in_forward", ["--budget", "60%"], "ended the process"),
        ("{source}:needs", ["--budget", "60%"], "'rows'"),
        ("", ["--budget", "60%"], "FILE.py:FUNCTION"),
        ("{source}", ["--budget", "60%", "--bugdet", "60%"], "--budget"),
        ("{source}", ["{source}", "--budget", "60%"], "unexpected extra argument"),
        ("{source}", ["--budget", "60%", "--out", "."], "directory"),
        ("{source}:targett", ["--budget", "60%"], "Did you mean"),
        ("{source}:ready", ["--budget", "60%"], "is a Linear, not a function"),
        ("{source}", ["--budget", "60"], "bytes or per cent"),
        ("{source}", ["--budget", "0.6"], "Write '60%'"),
        ("{source}", ["--budget", "1_000_000"], "Write '1_000_000B', or"),
        ("{source}", ["--budget", "0%"], "positive"),
        ("{source}", ["--budget=-1GiB"], "-1GiB"),
        ("{source}", ["--budget", "60%", "--batch", "4"], "no parameter 'batch'"),
        ("{source}", ["--budget", "60%", "--batch", "0"], "--batch"),
        ("{source}", ["--budget", "60%", "--optimizer", "adamww"], "Did you mean adamw"),
        ("{source}", ["--budget", "60%", "--dtype", "int8"], "--dtype"),
        ("{source}", ["--budget", "60%", "--fsdp", "8"], "--device"),
        ("{source}", ["--budget", "60%", "--device", "cuda"], "there is none"),
        ("{source}", ["--budget", "60%", "--out", "/nowhere/plan.json"], "no folder"),
        ("{source}", [], "--budget"),
        ("hf:gpt2?n_layers_=2", ["--budget", "60%"], "n_layer"),
        ("hf:gpt2?n_layer=two", ["--budget", "60%"], "two"),
        ("jax:missing.py:loss", ["--budget", "60%"], "missing.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(target: str, options: list[str], message: str, source, capsys) -> None:
    options = [option.format(source=source) for option in options]
    assert run(["plan", target.format(source=source), *options, "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line and not line.startswith("hint:")]
    assert len(errors) == 1, captured.err
    assert message in errors[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("target", ["{source}", "hf:gpt2?n_layer=1"])
def test_steps_on_a_gpu_that_is_not_here_are_refused_in_one_line(target: str, source: str, capsys) -> None:
    for command in (["fit", "--budget", "60%"], ["validate"], ["bench"]):
        assert run([command[0], target.format(source=source), *command[1:], "--device", "cuda", "--quiet"]) == 2
        said = capsys.readouterr().err
        assert "there is none" in said and len(said.splitlines()) == 1


def test_errors_are_json_where_json_was_asked_for_and_targets_do_not_talk_on_stdout(source: str, capsys) -> None:
    assert run(["plan", f"{source}:no_batch", "--budget", "60%", "--json", "--quiet"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E101"
    assert run(["plan", source, "--json", "--quiet"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["hint"] == "recoup plan --help"
    assert run(["plan", source, "--budget", "99%", "--json", "--quiet", "--out", "/proc/plan.json"]) == 2
    assert "/proc/plan.json" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert run(["profile", f"{source}:talks", "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["model_class"] == "Linear"
    assert "made by the target" in captured.err


def test_an_impossible_budget_is_exit_3(source: str, capsys) -> None:
    assert run(["plan", source, "--budget", "1KiB", "--quiet"]) == 3
    assert "smallest reachable peak" in capsys.readouterr().err


def test_plan_json_out_and_show(source: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    assert run(["plan", source, "--budget", "85%", "--json", "--quiet", "--out", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["predicted"]["peak_bytes"] <= data["budget_bytes"]
    assert json.loads(out.read_text())["schema"] == "recoup-plan/2"
    assert run(["show", str(out)]) == 0
    assert "predicted peak" in capsys.readouterr().out


def test_fit_ends_with_the_verdict(source: str, capsys) -> None:
    assert run(["fit", source, "--budget", "85%", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert text.rstrip().endswith("ok: within the budget, and exact")
    assert "bit-equal to plain" in text


@pytest.mark.slow
def test_report_is_a_page_with_a_trace_and_needs_a_plan_of_this_model(source: str, tmp_path: Path, capsys) -> None:
    plan, page, trace = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "trace.json"
    assert run(["plan", source, "--budget", "85%", "--quiet", "--out", str(plan)]) == 0
    capsys.readouterr()
    options = ["--plan", str(plan), "--out", str(page), "--trace", str(trace), "--quiet"]
    assert run(["report", source, *options]) == 0
    assert capsys.readouterr().out == ""
    assert page.read_text().startswith("<!doctype html>") and "Planned step" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert run(["report", source, "--plan", str(plan), "--budget", "60%"]) == 2
    assert "Give one of them" in capsys.readouterr().err
    changed = json.loads(plan.read_text()) | {"fingerprint": "other"}
    plan.write_text(json.dumps(changed))
    assert run(["report", source, *options]) == 2
    assert "made for another model" in capsys.readouterr().err
    assert run(["report", str(plan), "--out", str(page), "--quiet"]) == 0
    assert "Planned step" not in page.read_text() and "The plan in words" in page.read_text()


@pytest.mark.slow
def test_fit_writes_a_page_of_what_was_measured(source: str, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    assert run(["fit", source, "--budget", "85%", "--quiet", "--html", str(page)]) == 0
    assert "Measured: within the budget, and exact." in page.read_text()
    assert run(["fit", source, "--budget", "85%", "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_diff_and_export(source: str, tmp_path: Path, capsys) -> None:
    a, b, code = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "code.py"
    assert run(["plan", source, "--budget", "85%", "--actions", "rederive", "--quiet", "--out", str(a)]) == 0
    assert run(["plan", source, "--budget", "85%", "--actions", "recompute", "--quiet", "--out", str(b)]) == 0
    capsys.readouterr()
    assert run(["diff", str(a), str(a)]) == 0
    assert "do the same" in capsys.readouterr().out
    assert run(["diff", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"]
    assert run(["export", str(b), "--out", str(code)]) == 0
    assert "def apply_plan(model)" in code.read_text()
    assert run(["export", str(b), "--to", "fsdp"]) == 0
    assert "make_policy" in capsys.readouterr().out
    assert run(["export", str(b), "--to", "keras"]) == 2
    assert run(["diff", str(a), str(tmp_path / "none.json")]) == 2


def test_profile_and_frontier(source: str, capsys) -> None:
    assert run(["profile", source, "--quiet"]) == 0
    assert "alive at the peak" in capsys.readouterr().out
    assert run(["frontier", source, "--quiet"]) == 0
    assert "of plain" in capsys.readouterr().out


def test_help_names_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("-\n", "-").split()).replace("- ", "-")
    assert [action for action in (*DEFAULT_ACTIONS, *OPT_IN_ACTIONS) if action not in said] == []


@pytest.mark.parametrize(
    "command", [["explain", "--budget", "60%"], ["advise", "--budget", "60%"], ["report"], ["bench"]]
)
def test_commands_for_models_say_which_take_jax_steps(command: list[str], source: str, capsys) -> None:
    assert run([command[0], f"jax:{source}:target", *command[1:], "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "is a JAX step" in said and "No file" not in said
