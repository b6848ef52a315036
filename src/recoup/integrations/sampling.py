"""The batch that a Trainer's steps are planned for: the largest that a data set's first examples make.

The batch of the longest examples takes the most memory, but for one thing: if they are all of one length, nothing in it
is padded and models skip its mask, which takes bytes in the batches where there is padding. So a shorter example takes
the place of one of them where the collator pads it to the same shapes.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.utils.generic import find_labels

from recoup._pytree import iterate_tensors
from recoup.capture.snapshot import random_state, set_random_state
from recoup.errors import UsageError

_SAMPLED_EXAMPLES = 1000  # of a data set, for the longest: reading all of it may take hours

Collator = Callable[[list[Any]], Any]


def sample_batch(
    dataset: Iterable[Any],
    batch_size: int,
    data_collator: Collator | None = None,
    *,
    columns: Collection[str] | None = None,
) -> Any:
    """Returns the collated batch of the longest examples, with padding if it can be: its step has the largest peak.

    An example's length is the number of elements in its columns; text has none. Examples are collated twice at most.
    What the data set and the collator draw from the global random streams is put back, so that training draws it.

    Args:
        dataset: the data, of which the first 1000 examples are read.
        batch_size: examples in the batch.
        data_collator: collates a list of examples; None: transformers' default one.
        columns: those that are left in examples that are dicts; None: all.

    Raises:
        UsageError: if there are no examples.
    """
    before = random_state()
    try:
        found = itertools.islice(iter(dataset), _SAMPLED_EXAMPLES)
        examples = [_with_columns(example, columns) for example in found]
        if not examples:
            raise UsageError("The training dataset is empty; there is no batch to plan for.")
        return _largest_batch(examples, batch_size, default_data_collator if data_collator is None else data_collator)
    finally:
        set_random_state(before)


def columns_for(model: nn.Module, args: TrainingArguments) -> list[str] | None:
    """Returns the columns that a `Trainer` with this model and these arguments leaves in its data; None: all."""
    if not args.remove_unused_columns:
        return None
    inner = without_adapters(model)
    labels = find_labels(type(inner)) if args.label_names is None else args.label_names  # type: ignore[no-untyped-call]
    return [*inspect.signature(inner.forward).parameters, "label", "label_ids", *labels]


def columns_of(trainer: Trainer) -> list[str] | None:
    """Returns the columns that this trainer leaves in its data, asked of itself: TRL's have their own; None: all."""
    if not trainer.args.remove_unused_columns:
        return None
    before = trainer._signature_columns
    try:
        trainer._set_signature_columns_if_needed()
        return None if trainer._signature_columns is None else list(trainer._signature_columns)
    finally:
        trainer._signature_columns = before


def without_adapters(model: Any) -> Any:
    """Returns the model inside of PEFT's wrapper, or the model itself if there is none."""
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    is_mixed = hasattr(model, "peft_config") and hasattr(model.base_model, "model")
    return model.base_model.model if is_mixed else model


def _with_columns(example: Any, columns: Collection[str] | None) -> Any:
    if columns is None or not isinstance(example, dict):  # as a Trainer: it leaves other mappings as they are
        return example
    return {name: value for name, value in example.items() if name in columns}


def _largest_batch(examples: list[Any], batch_size: int, collate: Collator) -> Any:
    sizes = list(map(_num_elements, examples))
    order = sorted(range(len(examples)), key=sizes.__getitem__, reverse=True)
    longest = order[:batch_size]
    shorter = next((i for i in order if sizes[i] < sizes[longest[0]]), None)
    batch = collate([examples[i] for i in longest])
    if shorter is None or shorter in longest:
        return batch
    try:
        padded = collate([examples[i] for i in (*longest[:-1], shorter)])
    except Exception:  # a collator that does not pad: whatever it raises, its batches are of one length
        return batch
    shapes = _shapes(batch)
    return padded if shapes and _shapes(padded) == shapes else batch


def _num_elements(value: Any) -> int:
    """Returns the number of elements of a column or, if it is a mapping, of all; lists are as long as their first."""
    if isinstance(value, Mapping):
        return sum(map(_num_elements, value.values()))
    if hasattr(value, "shape"):
        return math.prod(value.shape)
    if isinstance(value, (str, bytes)) or value is None:
        return 0
    if isinstance(value, (list, tuple)):
        return len(value) * _num_elements(value[0]) if value else 0
    return len(value) if isinstance(value, Sized) else 1


def _shapes(batch: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in iterate_tensors(batch)]
