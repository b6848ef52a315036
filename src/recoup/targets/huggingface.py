"""`hf:` targets: a transformers configuration with overrides, random weights, a random batch; no download.

The task is the first of image classification, encoder-decoder, masked and causal language modelling that transformers
has a head for. Models are in training mode and keep no key-value cache (`use_cache=False`), as their trainer runs them.
"""

from __future__ import annotations

import contextlib
import difflib
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup.errors import TargetError
from recoup.targets.parse import HubTarget

_TASKS = ("IMAGE_CLASSIFICATION", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM")
_BATCH_EXAMPLES = 4  # where none is named
_SEQ_TOKENS = 512  # where none is named, and the model takes as many
_IMAGE_PIXELS = 224  # a side, where the configuration names none


def build(
    target: HubTarget,
    *,
    batch: int | None,
    seq: int | None,
    image: int | None,
    dtype: torch.dtype | None,
    device: str,
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns the model, in training mode, and a batch with labels.

    Args:
        target: what was asked.
        batch, seq, image: sizes; None: 4, at most 512, and the configuration's own or 224.
        dtype: of the parameters; None: float32.
        device: "meta": parameters without data; integer buffers and the batch's integers are real, since some models
            look at them.

    Raises:
        TargetError: if transformers is missing, or does not know the type, a key or a value.
    """
    try:
        import transformers
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise TargetError(
            "hf: targets need transformers, which is not installed: pip install 'recoup[transformers]'. FILE.py "
            "targets work without it."
        ) from error
    task = _task(target, modeling_auto)
    config = _config(target, transformers.AutoConfig, image)
    class_name = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[target.model_type]
    # Some types have several heads for one task; the first is the plain one.
    model_class = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    with _own_randomness(), _parameters_on_meta() if device == "meta" else contextlib.nullcontext():
        model: nn.Module = _guarded(target, lambda: model_class._from_config(config, dtype=dtype or torch.float32))
        if device.startswith("cuda"):
            model = model.to(device)
        model.train()
        if task == "IMAGE_CLASSIFICATION":
            inputs = _image_batch(config, batch or _BATCH_EXAMPLES, image, dtype, device)
        else:
            length = _length(target, config, model, seq)
            inputs = _token_batch(config, task, batch or _BATCH_EXAMPLES, length)
    if device.startswith("cuda"):
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    return model, inputs


def _task(target: HubTarget, modeling_auto: Any) -> str:
    known: set[str] = set()
    for task in _TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        known |= set(names)
        if target.model_type in names:
            return task
    close = difflib.get_close_matches(target.model_type, sorted(known), n=3)
    advice = f"Did you mean {' or '.join(close)}?" if close else "For instance: gpt2, llama, bert, t5, vit, resnet."
    raise TargetError(
        f"Unknown hf: model type {target.model_type!r} (of {len(known)} for causal, masked and encoder-decoder "
        f"language models and image classification). {advice}"
    )


def _config(target: HubTarget, auto_config: Any, image: int | None) -> Any:
    default = _guarded(target, lambda: auto_config.for_model(target.model_type))
    overrides: dict[str, Any] = dict(target.overrides)
    known = {*default.to_dict(), *getattr(default, "attribute_map", {})}
    for key in overrides:
        if key not in known and not hasattr(default, key):
            close = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.5)
            advice = f"Did you mean {' or '.join(close)}?" if close else "See its configuration in transformers."
            raise TargetError(f"{type(default).__name__} has no {key!r}. {advice}")
    if image is not None and hasattr(default, "image_size"):
        overrides.setdefault("image_size", image)
    if hasattr(default, "use_cache"):
        overrides.setdefault("use_cache", False)
    return _guarded(target, lambda: auto_config.for_model(target.model_type, **overrides))


def _guarded(target: HubTarget, make: Any) -> Any:
    """Returns `make()`; whatever transformers says against the values becomes one line."""
    try:
        return make()
    except Exception as error:  # configurations are checked by many kinds of exception, validators' own among them
        given = ", ".join(f"{key}={value}" for key, value in target.overrides) or "its defaults"
        what = " ".join(str(error).split())[:300]
        raise TargetError(
            f"transformers cannot build {target.model_type!r} with {given}: {type(error).__name__}: {what}"
        ) from error


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Draws from a seed of its own and leaves the caller's random streams as they were."""
    python = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Lets parameters lose their data as they are registered: no more than one holds memory at any time.

    A whole model under `torch.device("meta")` would lose its position tables too, and with them the values that
    models branch on.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta":
            return None  # as it is: tied parameters stay one object
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _text_config(config: Any) -> Any:
    """Returns the part of a configuration that has the vocabulary: itself, but for those made of several."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _length(target: HubTarget, config: Any, model: nn.Module, seq: int | None) -> int:
    """Returns the tokens of one example.

    Raises:
        TargetError: if there are more than the model has learned positions for. (Rotary ones have no end.)
    """
    most = getattr(_text_config(config), "max_position_embeddings", None)
    if not isinstance(most, int):
        return seq or _SEQ_TOKENS
    # Tables of positions may start after the padding index: RoBERTa's has two rows that are never used.
    tables = [
        module.num_embeddings
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in path or "wpe" in path)
    ]
    padding = getattr(_text_config(config), "pad_token_id", None)
    skipped = padding + 1 if target.model_type.endswith("roberta") and isinstance(padding, int) else 0
    learned = any(most <= size <= most + 2 for size in tables)
    if learned and seq is not None and seq > most - skipped:
        raise TargetError(
            f"--seq {seq} is more than the {most - skipped} positions of {target.model_type!r}. Use a smaller --seq, "
            f"or 'hf:{target.model_type}?max_position_embeddings={seq + skipped}'."
        )
    return seq or min(_SEQ_TOKENS, most - skipped)


def _named_tokens(config: Any) -> set[int]:
    """Returns the ids that a configuration names (padding, mask, end of text, image): some models look for these."""
    found: set[int] = set()
    for part in (config, _text_config(config)):
        for name, value in part.to_dict().items():
            if name.endswith(("token_id", "token_index")):
                found.update(value if isinstance(value, list) else [value])
    return found


def _token_batch(config: Any, task: str, batch: int, seq: int) -> dict[str, torch.Tensor]:
    vocabulary = int(_text_config(config).vocab_size)
    named = _named_tokens(config)
    ordinary = torch.tensor([i for i in range(vocabulary) if i not in named] or [0])

    def drawn() -> torch.Tensor:
        return ordinary[torch.randint(len(ordinary), (batch, seq))]

    ids = drawn()
    labels = ids.clone()
    if task == "MASKED_LM":
        labels[:, 1::2] = -100  # every other token is scored: which ones has no part in bytes or seconds
    elif task == "SEQ_TO_SEQ_CAUSAL_LM":
        labels = drawn()
        # Shifted here: some configurations do not say with which token their decoder starts.
        return {"input_ids": ids, "decoder_input_ids": labels.roll(1, dims=1), "labels": labels}
    return {"input_ids": ids, "labels": labels}


def _image_batch(
    config: Any, batch: int, image: int | None, dtype: torch.dtype | None, device: str
) -> dict[str, torch.Tensor]:
    own = getattr(config, "image_size", None)
    height, width = own if isinstance(own, (tuple, list)) else (own or image or _IMAGE_PIXELS,) * 2
    shape = (batch, int(getattr(config, "num_channels", 3)), int(height), int(width))
    if device == "meta":
        pixels = torch.empty(shape, dtype=dtype or torch.float32, device="meta")
    else:
        pixels = torch.randn(shape).to(dtype or torch.float32)
    return {"pixel_values": pixels, "labels": torch.randint(0, max(int(config.num_labels), 1), (batch,))}
