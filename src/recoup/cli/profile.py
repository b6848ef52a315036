"""`recoup profile`: where the memory and the time of the unplanned step go."""

from __future__ import annotations

from recoup.cli import jax_steps, options
from recoup.cli.console import print_data, print_json, showing_progress


def profile(
    target: options.TargetText,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.PlanDevice = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show where the memory and the time of one unplanned step go."""
    if target.startswith(jax_steps.PREFIX):
        jax_steps.check_options(batch=batch, seq=seq, image=image, dtype=dtype, optimizer=optimizer)
        jax_steps.profile(target, device=device, json=json, quiet=quiet)
        return
    request = options.check_request(
        target, batch=batch, seq=seq, image=image, dtype=dtype, optimizer=optimizer, device=device
    )
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=False)
        from recoup import api  # with it comes torch

        seen = api.profile(found.model, found.batch, **request.keywords(found))
    if json:
        print_json(seen.to_json())
    else:
        print_data(str(seen))
