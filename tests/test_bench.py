"""The side-by-side benchmark: its arithmetic on made-up rows, its peers, and a rehearsal of the GPU one."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import gpu, quick
from bench.auto_sac import auto_sac
from bench.measuring import flops_by_shape, metered, timed, to_host
from bench.methods import METHODS, Subject
from bench.peers_report import more_flops, noise, over_budget, unreached, write_report
from bench.points import at_equal_time, cells, nearly_free
from torch import nn

from recoup.capture.step import Objective
from recoup.evidence.step_bench import StepBench
from tests.thorough import thorough


def _row(method: str, peak: int, flops: int, time: float, ours: dict[str, Any] | None = None) -> dict[str, Any]:
    row = {"workload": "w", "method": method, "plain_bytes": 100, "plain_flops": 100, "peak_bytes": peak}
    row |= {"flops": flops, "time_ratio": time, "exact": True, "gradient_error": 0.0}
    if ours is not None:
        row["recoup"] = {"exact": True, "gradient_error": 0.0, "budget_bytes": peak, **ours}
    return row


def _ours(peak: int, flops: int, time: float) -> dict[str, Any]:
    return {
        "peak_bytes": peak,
        "flops": flops,
        "time_ratio": time,
        "predicted_bytes": peak,
        "predicted_time_ratio": time,
    }


ROWS = [
    _row("plain", 100, 100, 1.02),
    _row("a", 50, 130, 1.30, _ours(49, 110, 1.10)),
    _row("b", 60, 120, 1.40, _ours(61, 131, 1.02)),
    _row("c", 20, 140, 1.50, {"why_not": "no", "minimum_bytes": 30}),
    {"workload": "w", "method": "d", "plain_bytes": 100, "plain_flops": 100, "why_not": "cannot"},
]


class TestArithmetic:
    def test_best_peer_is_the_fastest_that_fits(self) -> None:
        found = {round(c.best.bytes * 100): c for c in cells(ROWS)}
        assert [c.best.method for c in cells(ROWS)] == ["a", "a", "c"]
        assert found[20].ours is None

    def test_a_plan_that_several_rows_ran_has_the_median_of_their_times(self) -> None:
        same = {"plan": {"decisions": [{"path": "a"}]}}
        rows = [
            _row(m, p, 120, 1.5, _ours(p, 100, t) | same)
            for m, p, t in (("a", 50, 1.0), ("b", 60, 1.2), ("c", 70, 1.1))
        ]
        rows.append(_row("d", 80, 120, 1.5, _ours(80, 100, 1.3) | {"plan": {"decisions": []}}))
        assert [c.ours.time for c in cells(rows) if c.ours] == [1.1, 1.1, 1.1, 1.3]

    def test_losses_are_named(self) -> None:
        assert over_budget(ROWS) == ["w, b (1 bytes over)"]
        assert more_flops(ROWS) == ["w, a (1.310 against 1.300)"]
        assert unreached(ROWS) == ["w, c (0.200, floor 0.300)"]
        assert noise(ROWS) == pytest.approx(0.02)

    def test_equal_time_and_nearly_free(self) -> None:
        assert at_equal_time(ROWS) == pytest.approx([49 / 50, 49 / 50, 49 / 20])
        (name, ours, best), *_ = nearly_free(ROWS)
        assert name == "w" and best is None
        assert ours is not None and ours.bytes == pytest.approx(0.61)

    def test_page_has_every_row_and_reason(self, tmp_path: Path) -> None:
        file = tmp_path / "peers-cpu-x.json"
        head = {"date": "d", "machine": "m", "versions": {"torch": "t"}, "rounds": 1, "wall_seconds": {"w": 1.0}}
        file.write_text(json.dumps({**head, "rows": ROWS}))
        write_report(file)
        page = file.with_suffix(".md").read_text()
        assert all(f"| {r['method']} |" in page for r in ROWS)
        assert "cannot" in page and "nan" not in page
        for picture in ("summary", "predictions", "w"):
            assert (tmp_path / f"peers-cpu-x-{picture}.svg").read_text().startswith("<svg")

    def test_page_of_plans_that_are_not_timed_says_so(self, tmp_path: Path) -> None:
        file = tmp_path / "peers-cpu-x.json"
        rows = copy.deepcopy(ROWS)
        for row in rows:
            row.get("recoup", {}).pop("time_ratio", None)
        head = {"date": "d", "machine": "m", "versions": {"torch": "t"}, "rounds": 1, "wall_seconds": {"w": 1.0}}
        file.write_text(json.dumps({**head, "times_of": {"date": "earlier", "machine": "other"}, "rows": rows}))
        write_report(file)
        page = file.with_suffix(".md").read_text()
        assert "not timed" in page and "of earlier, on other" in page
        assert "nan" not in page and ".svg" not in page

    def test_smoke_check_names_what_is_broken(self) -> None:
        good = _row("every layer", 50, 130, 1.3, _ours(49, 110, 1.1))
        assert quick.check(good, None) == []
        assert quick.check(good, dict(good)) == []
        worse = _row("every layer", 50, 130, 1.3, _ours(51, 131, 1.1))
        assert len(quick.check(worse, good | {"peak_bytes": 49})) == 3


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def _loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class TestMethods:
    @pytest.mark.parametrize(
        ("method", "flops"),
        # Matmuls that run again: a replay stops before its last one, whose result nobody saved. Of two segments of two
        # layers, torch checkpoints the first.
        [("every layer", 4), ("every 2nd layer", 2), ("sqrt segments", 3), ("SAC, matmuls kept", 0)],
    )
    def test_recomputed_flops_are_those_of_the_method(self, method: str, flops: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Layer() for _ in range(4)))
        batch = torch.randn(512, 64)
        bench = StepBench(model, batch, Objective(loss=_loss), None)
        known = flops_by_shape(bench)
        bench.restore()
        reference = to_host(bench.step(take=True))
        plain = metered(bench, METHODS["plain"](_subject(model, batch)), reference, known)
        found = metered(bench, METHODS[method](_subject(model, batch)), reference, known)
        one_matmul = 2 * 512 * 64 * 256
        assert found["flops"] - plain["flops"] == flops * one_matmul
        assert found["exact"] and found["peak_bytes"] < plain["peak_bytes"]

    def test_attention_of_a_cpu_is_counted(self) -> None:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(16))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q = x * self.scale
                return nn.functional.scaled_dot_product_attention(q, q, q)

        model, batch = nn.Sequential(Attention()), torch.randn(2, 4, 64, 16)
        bench = StepBench(model, batch, Objective(loss=_loss), None)
        one_product = 2 * 2 * 4 * 64 * 64 * 16
        assert sum(flops_by_shape(bench).values()) == 7 * one_product  # two forward, five backward
        found = metered(bench, METHODS["plain"](_subject(model, batch)), None, {})
        assert found["flops"] == 7 * one_product

    def test_time_is_beside_the_first_way(self) -> None:
        model = nn.Sequential(_Layer(), _Layer())
        bench = StepBench(model, torch.randn(8, 64), Objective(loss=_loss), None)
        ways = {"plain": METHODS["plain"](_subject(model, bench.batch))}
        found = timed(bench, ways, rounds=2)
        assert found["plain"]["time_ratio"] == 1.0 and math.isfinite(found["plain"]["seconds"])

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    def test_auto_sac_gives_the_same_gradients_in_less_memory(self) -> None:
        pytest.importorskip("pulp")
        pytest.importorskip("pwlf")
        model = nn.Sequential(*(_Layer() for _ in range(4)))
        batch = torch.randn(512, 64)
        bench = StepBench(model, batch, Objective(loss=_loss), None)
        reference = to_host(bench.step(take=True))
        plain = metered(bench, METHODS["plain"](_subject(model, batch)), reference, {})
        found = metered(bench, auto_sac(model, batch, _loss, 0.6), reference, {})
        assert found["exact"]
        assert found["peak_bytes"] < plain["peak_bytes"]


def _subject(model: nn.Module, batch: torch.Tensor) -> Subject:
    return Subject(model=model, batch=batch, loss=_loss, layers=[str(i) for i in range(len(list(model.children())))])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestWhole:
    def test_quick_benchmark_holds(self) -> None:
        assert quick.main(["conv3d", "--method", "every layer"]) == 0

    @thorough
    def test_gpu_benchmark_rehearses(self, tmp_path: Path) -> None:
        arguments = ["vit-l", "--rehearse", "--rounds", "1", "--minutes", "2", "--out", str(tmp_path)]
        assert gpu.main(arguments) == 0
        (file,) = tmp_path.glob("gpu-rehearsal-*.json")
        data = json.loads(file.read_text())
        methods = [row["method"] for row in data["rows"]]
        assert methods[0] == "plain" and {"80%", "floor", "every layer"} <= set(methods)
        assert any(row["recoup"]["peak_bytes"] < row["plain_bytes"] for row in data["rows"] if "recoup" in row)
        assert "NaN" not in file.read_text() or data["workloads"]
        assert file.with_suffix(".md").exists()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the benchmark would run")
    def test_gpu_benchmark_says_why_it_is_skipped(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert gpu.main([]) == 0
        assert "no CUDA GPU" in capsys.readouterr().err
