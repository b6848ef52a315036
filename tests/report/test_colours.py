"""The page's colours differ for every reader: with and without colour blindness, on light and on dark paper."""

from __future__ import annotations

import re

import numpy as np
import pytest

from recoup.analysis.timeline import CATEGORIES
from recoup.ir.report import Report
from recoup.report.html import format_html

_OKLAB = (
    np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]),
    np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]),
)
# Full protanopia, deuteranopia, tritanopia, in linear light (Machado, Oliveira and Fernandes 2009).
_BLIND = (
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
)


def _linear(colour: str) -> np.ndarray:  # type: ignore[type-arg]
    value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def _perceived(light: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return np.cbrt(np.clip(light, 0, None) @ _OKLAB[0].T) @ _OKLAB[1].T


def _contrast(a: str, b: str) -> float:
    low, high = sorted(float(_linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


def _schemes() -> list[dict[str, str]]:
    style = format_html(Report(title="colours"))
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    return [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block)) for block in blocks]


@pytest.mark.parametrize("colours", _schemes(), ids=["light", "dark"])
def test_fills_are_apart_for_every_kind_of_sight(colours: dict[str, str]) -> None:
    fills = np.stack([_linear(colours[c]) for c in (*CATEGORIES, "ink")])
    for seen in (fills, *(np.clip(fills @ blind.T, 0, 1) for blind in _BLIND)):
        distance = np.linalg.norm(_perceived(seen)[:, None] - _perceived(seen)[None], axis=-1)
        assert distance[~np.eye(len(fills), dtype=bool)].min() > 0.08  # 0.02 is just seen side by side
    strip = np.stack([_linear(colours[c]) for c in ("forward", "backward", "budget")])
    distance = np.linalg.norm(_perceived(strip)[:, None] - _perceived(strip)[None], axis=-1)
    assert distance[~np.eye(3, dtype=bool)].min() > 0.15


@pytest.mark.parametrize("colours", _schemes(), ids=["light", "dark"])
def test_text_and_lines_stand_out_from_paper(colours: dict[str, str]) -> None:
    for ground in ("paper", "panel"):
        for text in ("ink", "soft", "accent", "good", "bad", "budget"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert all(_contrast(colours[c], colours["paper"]) >= 1.4 for c in CATEGORIES)
