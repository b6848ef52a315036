"""What reinforcement learning, preference training and distillation do with logits, without the logits.

Each public function is a few lines of arithmetic on one tile's logits (`_chosen` and the others at the end), handed to
the one loop over tiles (`function.py`). With reduction "mean" and "sum" gradients are taken in the forward: as many
matmuls as the plain loss runs. With "none", what training with advantages or a margin needs, backward makes each tile's
logits again: one matmul more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Unpack

import torch
from torch.nn.functional import linear, pad

from recoup.runtime.tile.loss.arguments import HeadInput, HeadOptions, check, check_product, head_input
from recoup.runtime.tile.loss.function import tiled_loss
from recoup.runtime.tile.loss.math import Step
from recoup.runtime.tile.loss.per_token import FunctionSpec, PerToken, apply_steps

# Shapes: N tokens, H hidden, V classes, T tokens of a tile, K classes of a token that are looked at.

_INTEGER = (torch.int64, torch.int32, torch.int16, torch.uint8)


def tiled_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    shift: bool = False,
    **head: Unpack[HeadOptions],
) -> torch.Tensor:
    """Returns the log-probability of each token's label, 0 where it is ignored: what PPO, GRPO and DPO are made of.

    Args:
        hidden: (..., H), floating.
        weight: (V, H), the same dtype; frozen, it costs no matmul for a gradient.
        labels: (...), integers in [0, V) or `ignore_index`; or (..., K), several classes of each token.
        shift: the hidden state of token i is scored against label i + 1 of its row, the last one against nothing.
        **head: bias, logit_scale, softcap, temperature, and the size of a tile; see `HeadOptions`.

    Returns:
        The labels' shape, in float32 (float64 for float64 input). A second derivative raises.

    Raises:
        UsageError: if shapes, dtypes or options do not go together.

    Example:
        >>> hidden, weight = torch.randn(2, 128, 64, requires_grad=True), torch.randn(1000, 64)
        >>> recoup.tiled_log_probs(hidden, weight, torch.randint(0, 1000, (2, 128)), temperature=0.7).shape
        torch.Size([2, 128])
    """
    where = "tiled_log_probs"
    several = labels.dim() == hidden.dim()
    labels = _labels(where, hidden, labels, ignore_index, shift)
    ready = head_input(where, hidden, weight, **head)
    flat = labels.reshape(len(ready.hidden), labels.shape[-1] if several else 1)
    kept = flat != ignore_index
    rows = _run(ready, chosen, kept.any(1), [flat.masked_fill(~kept, 0)], num_columns=flat.shape[1])
    return rows.masked_fill(~kept, 0).view(labels.shape)


def tiled_log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    shift: bool = False,
    **head: Unpack[HeadOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probability of each token's label and the entropy of its distribution, in one pass over tiles.

    Args:
        hidden, weight, ignore_index, shift, head: as for `tiled_log_probs`.
        labels: (...).

    Returns:
        Two tensors of the labels' shape, both 0 where the label is ignored.

    Raises:
        UsageError: if shapes, dtypes or options do not go together.

    Example:
        >>> hidden, weight = torch.randn(2, 16, 64, requires_grad=True), torch.randn(1000, 64)
        >>> labels = torch.randint(0, 1000, (2, 16))
        >>> logps, entropy = recoup.tiled_log_probs_and_entropy(hidden, weight, labels)
        >>> (logps - 0.01 * entropy).mean().backward()
    """
    where = "tiled_log_probs_and_entropy"
    check(labels.dim() == hidden.dim() - 1, where, f"labels must have one entry a token; got {list(labels.shape)}")
    labels = _labels(where, hidden, labels, ignore_index, shift)
    ready = head_input(where, hidden, weight, **head)
    flat = labels.reshape(-1, 1)
    counts = flat[:, 0] != ignore_index
    rows = _run(ready, _chosen_and_entropy, counts, [flat.masked_fill(~counts[:, None], 0)], num_columns=2)
    return rows[:, 0].view(labels.shape), rows[:, 1].view(labels.shape)


def tiled_entropy(hidden: torch.Tensor, weight: torch.Tensor, **head: Unpack[HeadOptions]) -> torch.Tensor:
    """Returns the entropy, in nats, of each token's distribution: (...).

    Args:
        hidden, weight, head: as for `tiled_log_probs`.

    Raises:
        UsageError: if shapes, dtypes or options do not go together.

    Example:
        >>> hidden, weight = torch.randn(2, 16, 64, requires_grad=True), torch.randn(1000, 64)
        >>> recoup.tiled_entropy(hidden, weight, num_tiles=2).mean().backward()
    """
    return _run(head_input("tiled_entropy", hidden, weight, **head), entropy).view(hidden.shape[:-1])


def tiled_logsumexp(hidden: torch.Tensor, weight: torch.Tensor, **head: Unpack[HeadOptions]) -> torch.Tensor:
    """Returns the logsumexp of each token's logits: (...); squared and weighted, it is the z-loss of PaLM.

    Args:
        hidden, weight, head: as for `tiled_log_probs`.

    Raises:
        UsageError: if shapes, dtypes or options do not go together.

    Example:
        >>> hidden, weight = torch.randn(2, 16, 64, requires_grad=True), torch.randn(1000, 64)
        >>> z_loss = 1e-4 * recoup.tiled_logsumexp(hidden, weight).square().mean()
    """
    return _run(head_input("tiled_logsumexp", hidden, weight, **head), logsumexp).view(hidden.shape[:-1])


def tiled_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    reference: torch.Tensor,
    *,
    reference_weight: torch.Tensor | None = None,
    reference_bias: torch.Tensor | None = None,
    direction: str = "reverse",
    mask: torch.Tensor | None = None,
    reduction: str = "none",
    **head: Unpack[HeadOptions],
) -> torch.Tensor:
    """Returns the Kullback-Leibler divergence of each token's distribution and a reference's, which is held constant.

    Args:
        hidden, weight, head: as for `tiled_log_probs`. The temperature divides the reference's logits too.
        reference: the reference's hidden states, (..., R), with `reference_weight` (V, R) and perhaps `reference_bias`
            (V,): then nobody's logits are there, and `logit_scale` and `softcap` hold for both. Without the weight:
            its logits, (..., V).
        direction: "reverse" is KL(model || reference), the penalty of reinforcement learning; "forward" is
            KL(reference || model), distillation.
        mask: (...), bool: tokens that count.
        reduction: "none", or "sum" or "mean" over the tokens that count.

    Returns:
        (...), or a scalar, in float32 (float64 for float64 input).

    Raises:
        UsageError: if shapes, dtypes or options do not go together, or the reference asks for gradients.

    Example:
        >>> hidden, weight = torch.randn(2, 16, 64, requires_grad=True), torch.randn(1000, 64)
        >>> recoup.tiled_kl(hidden, weight, hidden.detach(), reference_weight=weight, reduction="mean").item()
        0.0
    """
    where = "tiled_kl"
    check(direction in ("reverse", "forward"), where, f"direction must be reverse or forward; got {direction!r}")
    ready = head_input(where, hidden, weight, **head)
    whole: list[torch.Tensor] = []
    if reference_weight is None:
        check(reference_bias is None, where, "reference_bias needs reference_weight")
        wanted = (*hidden.shape[:-1], len(weight))
        check(reference.shape == wanted, where, f"reference {list(reference.shape)} must be logits {list(wanted)}")
        steps: tuple[Step, ...] = ready.steps[-1:] if head.get("temperature") is not None else ()
    else:
        check_product(where, reference, reference_weight, reference_bias)
        check(
            reference.shape[:-1] == hidden.shape[:-1] and len(reference_weight) == len(weight),
            where,
            f"reference {list(reference.shape)} and reference_weight {list(reference_weight.shape)} must have the "
            f"tokens of hidden {list(hidden.shape)} and the classes of weight {list(weight.shape)}",
        )
        whole = [reference_weight] if reference_bias is None else [reference_weight, reference_bias]
        steps = ready.steps
        if torch.is_autocast_enabled(hidden.device.type):
            reference, *whole = (t.to(ready.hidden.dtype) for t in (reference, *whole))
    _constant(where, reference=reference, reference_weight=reference_weight, reference_bias=reference_bias)
    function = functools.partial(_divergence, steps=steps, is_forward=direction == "forward")
    flat = reference.reshape(len(ready.hidden), reference.shape[-1])
    return _reduced(where, ready, hidden, function, mask, reduction, [flat], whole)


def tiled_soft_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    **head: Unpack[HeadOptions],
) -> torch.Tensor:
    """Returns the cross entropy against soft targets, `-sum(targets * log_softmax(logits))`.

    Args:
        hidden, weight, head: as for `tiled_log_probs`.
        targets: (..., V), weights of the classes; they get no gradient.
        mask, reduction: as for `tiled_kl`.

    Raises:
        UsageError: if shapes, dtypes or options do not go together, or the targets ask for gradients.

    Example:
        >>> hidden, weight = torch.randn(2, 16, 64, requires_grad=True), torch.randn(1000, 64)
        >>> targets = torch.randn(2, 16, 1000).softmax(-1)
        >>> recoup.tiled_soft_cross_entropy(hidden, weight, targets).backward()
    """
    where = "tiled_soft_cross_entropy"
    ready = head_input(where, hidden, weight, **head)
    wanted = (*hidden.shape[:-1], len(weight))
    check(targets.shape == wanted, where, f"targets {list(targets.shape)} must be {list(wanted)}")
    _constant(where, targets=targets)
    return _reduced(where, ready, hidden, _soft, mask, reduction, [targets.reshape(-1, len(weight))])


def tiled_topk_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    log_probs: torch.Tensor,
    *,
    tail: bool = True,
    mask: torch.Tensor | None = None,
    reduction: str = "mean",
    **head: Unpack[HeadOptions],
) -> torch.Tensor:
    """Returns KL(teacher || model) where of the teacher only its K best classes a token are known.

    Args:
        hidden, weight, head: as for `tiled_log_probs`.
        indices: (..., K), the classes, each once a token.
        log_probs: (..., K), the teacher's log-probabilities of them (at the same temperature); no gradient.
        tail: all other classes count as one, with the probability that is left; if False they count for nothing, and
            both distributions are taken over the K classes alone.
        mask, reduction: as for `tiled_kl`.

    Raises:
        UsageError: if shapes, dtypes or options do not go together, or `log_probs` asks for gradients.

    Example:
        >>> hidden, weight = torch.randn(2, 16, 64, requires_grad=True), torch.randn(1000, 64)
        >>> best, indices = torch.randn(2, 16, 1000).log_softmax(-1).topk(8)
        >>> recoup.tiled_topk_distillation(hidden, weight, indices, best).backward()
    """
    where = "tiled_topk_distillation"
    ready = head_input(where, hidden, weight, **head)
    check(
        indices.dim() == hidden.dim() and indices.shape[:-1] == hidden.shape[:-1] and indices.dtype in _INTEGER,
        where,
        f"indices {list(indices.shape)} of {indices.dtype} must be integers (..., K) for hidden {list(hidden.shape)}",
    )
    check(log_probs.shape == indices.shape, where, f"log_probs {list(log_probs.shape)} must be {list(indices.shape)}")
    _constant(where, log_probs=log_probs)
    num = indices.shape[-1]
    check(num < len(weight) or not tail, where, f"with all {num} classes given there is no tail: pass tail=False")
    cut = [indices.reshape(-1, num).to(torch.int64), log_probs.reshape(-1, num)]
    return _reduced(where, ready, hidden, functools.partial(_topk, tail=tail), mask, reduction, cut)


# Functions of one tile's logits.


def chosen(logits_TV: torch.Tensor, index_TK: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities of some classes, (T, K)."""
    return logits_TV.log_softmax(1).gather(1, index_TK)


def logsumexp(logits_TV: torch.Tensor) -> torch.Tensor:
    """Returns the logsumexp of each row, (T,)."""
    return logits_TV.logsumexp(1)


def entropy(logits_TV: torch.Tensor) -> torch.Tensor:
    """Returns the entropy of each row, (T,); a class of probability 0 adds nothing."""
    logp_TV = logits_TV.log_softmax(1)
    return _expectation(logp_TV, -logp_TV)


def _expectation(logp_TV: torch.Tensor, value_TV: torch.Tensor) -> torch.Tensor:
    p_TV = logp_TV.exp()
    return (p_TV * value_TV.masked_fill(p_TV == 0, 0)).sum(1)


def _chosen_and_entropy(logits_TV: torch.Tensor, index_T1: torch.Tensor) -> torch.Tensor:
    logp_TV = logits_TV.log_softmax(1)
    return torch.cat([logp_TV.gather(1, index_T1), _expectation(logp_TV, -logp_TV).unsqueeze(1)], 1)


def _divergence(
    logits_TV: torch.Tensor,
    reference_T: torch.Tensor,
    *whole: torch.Tensor,
    steps: Sequence[Step],
    is_forward: bool,
) -> torch.Tensor:
    output_TV = linear(reference_T, *whole) if whole else reference_T
    logq_TV = apply_steps(output_TV, steps).to(logits_TV.dtype).log_softmax(1)
    logp_TV = logits_TV.log_softmax(1)
    return _expectation(logq_TV, logq_TV - logp_TV) if is_forward else _expectation(logp_TV, logp_TV - logq_TV)


def _soft(logits_TV: torch.Tensor, targets_TV: torch.Tensor) -> torch.Tensor:
    return -(targets_TV.to(logits_TV.dtype) * logits_TV.log_softmax(1)).sum(1)


def _topk(logits_TV: torch.Tensor, index_TK: torch.Tensor, logq_TK: torch.Tensor, *, tail: bool) -> torch.Tensor:
    logq_TK = logq_TK.to(logits_TV.dtype)
    if not tail:
        return _expectation(logq := logq_TK.log_softmax(1), logq - logits_TV.gather(1, index_TK).log_softmax(1))
    logp_TK = chosen(logits_TV, index_TK)
    rest_TV = logits_TV.scatter(1, index_TK, -torch.inf)  # not 1 - sum(p): that is all rounding where p is near 1
    left_T = rest_TV.logsumexp(1) - logits_TV.logsumexp(1)
    leftq_T = (1 - logq_TK.exp().sum(1)).clamp_min(0).log()
    logq = torch.cat([logq_TK, leftq_T.unsqueeze(1)], 1)
    return _expectation(logq, logq - torch.cat([logp_TK, left_T.unsqueeze(1)], 1))


# Arguments.


def _labels(where: str, hidden: torch.Tensor, labels: torch.Tensor, ignore: int, shift: bool) -> torch.Tensor:
    check(labels.dtype in _INTEGER, where, f"labels must be class indices; got {labels.dtype}")
    tokens = hidden.shape[:-1]
    check(
        labels.shape[: len(tokens)] == tokens and labels.dim() in (len(tokens), len(tokens) + 1),
        where,
        f"labels {list(labels.shape)} must have one entry, or K, a token of hidden {list(hidden.shape)}",
    )
    labels = labels.to(torch.int64)  # `ignore` may be none of their own dtype
    if not shift:
        return labels
    check(len(tokens) >= 1, where, "shift needs a dimension of tokens")
    after = (0, 0) * (labels.dim() - len(tokens))
    return pad(labels, (*after, 0, 1), value=ignore).narrow(len(tokens) - 1, 1, tokens[-1])


def _constant(where: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        asks = tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
        check(not asks, where, f"`{name}` is held constant and gets no gradient, but it requires one; detach it")


def _reduced(
    where: str,
    ready: HeadInput,
    hidden: torch.Tensor,
    function: PerToken,
    mask: torch.Tensor | None,
    reduction: str,
    cut: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    check(reduction in ("mean", "sum", "none"), where, f"reduction must be mean, sum or none; got {reduction!r}")
    if mask is not None:
        fits = mask.shape == hidden.shape[:-1] and mask.dtype == torch.bool
        check(fits, where, f"mask {list(mask.shape)} of {mask.dtype} must be bool {list(hidden.shape[:-1])}")
        mask = mask.reshape(-1)
    found = _run(ready, function, mask, cut, whole, reduction=reduction)
    return found.view(hidden.shape[:-1]) if reduction == "none" else found


def _run(
    ready: HeadInput,
    function: PerToken,
    counts: torch.Tensor | None = None,
    cut: Sequence[torch.Tensor] = (),
    whole: Sequence[torch.Tensor] = (),
    *,
    reduction: str = "none",
    num_columns: int = 0,
) -> torch.Tensor:
    if counts is None:
        counts = torch.ones(len(ready.hidden), dtype=torch.bool, device=ready.hidden.device)
    spec = FunctionSpec(
        function=function,
        steps=ready.steps,
        reduction=reduction,
        tile_tokens=ready.tile_tokens,
        num_cut=1 + len(cut),
        num_columns=num_columns,
    )
    return tiled_loss(ready.hidden, ready.weight, ready.bias, [counts, *cut, *whole], spec)
