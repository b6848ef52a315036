"""A model on the second of two cards: nothing is allocated on the first, which is the current one all the time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.cuda_stub.kit import stub

assert stub.is_active()


def test_a_model_on_the_second_card_leaves_the_first_alone(tmp_path: Path) -> None:
    library = tmp_path / "two_cards.so"
    source = Path(__file__).with_name("two_cards.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": f"{library}:{os.environ['LD_PRELOAD']}"}
    command = [sys.executable, "-m", "tests.cuda_stub.test_second_card"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("ok\n"), done.stdout + done.stderr  # the exit of a process is not ours to judge


def main() -> None:
    """Plans, trains, proves and profiles on "cuda:1"."""
    import recoup
    from recoup.cost.devices import get_device
    from recoup.cost.roofline import RooflineCost
    from tests.cuda_stub.models import transformer

    def loss(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return y.square().mean()

    assert torch.cuda.device_count() == 2
    model, x = transformer(dropout=0.1).to("cuda:1"), torch.zeros(8, 256, 128, device="cuda:1")
    assert {p.get_device() for p in model.parameters()} == {1}
    torch.cuda.empty_cache()  # the model was made on the first
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"loss": loss, "optimizer": optimizer}
    cost = RooflineCost(get_device("h100-sxm"))
    for device, actions in (("cuda:1", None), ("cuda", ("offload",)), (None, ("recompute",))):
        plan = recoup.plan(model, x, budget="70%", device=device, actions=actions, cost=cost, **options)
        assert plan.device == "cuda:1" and plan.decisions
        with recoup.apply(model, plan):
            for _ in range(2):
                loss(model(x), x).backward()
                optimizer.step()
                optimizer.zero_grad()
    evidence = recoup.verify(model, plan, x, timed=False, **options)
    assert evidence.num_regions_replayed
    assert recoup.profile(model, x, loss=loss).peak_bytes > 0
    assert (torch.cuda.memory_reserved(0), torch.cuda.current_device()) == (0, 0)
    assert torch.cuda.memory_reserved(1) > 0
    print("ok", flush=True)


if __name__ == "__main__":
    main()
