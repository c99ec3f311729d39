"""Colours of the figures: pairs that stand side by side differ for colour-blind readers, too."""

from itertools import combinations

import numpy as np
import pytest

from spipe.plots.style import BUSY, CAUSE_COLOURS, GROUP_COLOURS, SERIES, text_on

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    root = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(
    "colours", [{"busy": BUSY} | CAUSE_COLOURS, GROUP_COLOURS, dict(enumerate(SERIES))], ids=["causes", "ops", "series"]
)
def test_colours_differ(colours: dict[object, str], vision: str) -> None:
    seen = {name: lab(VISION[vision] @ linear(colour)) for name, colour in colours.items()}
    near = {
        pair: round(float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])), 1)
        for pair in combinations(seen, 2)
        if np.linalg.norm(seen[pair[0]] - seen[pair[1]]) < 9
    }
    assert not near


def test_text_is_read_on_every_colour() -> None:
    for colour in {*GROUP_COLOURS.values(), *CAUSE_COLOURS.values(), BUSY}:
        light = {"black": 0.0, "white": 1.0}[text_on(colour)]
        luminance = float((TO_XYZ @ linear(colour))[1])
        contrast = (max(light, luminance) + 0.05) / (min(light, luminance) + 0.05)
        assert contrast >= 3.0, colour
