"""Drawings of the documentation: up to date, readable, and with correct numbers."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from torchrl_marl.functional import gae

pytestmark = pytest.mark.pages

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def drawings(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import drawings

    return drawings


def test_stored_pictures_equal_generated_ones(drawings):
    for name, picture in drawings.pictures().items():
        written = (DOCS / "pictures" / name).read_text(encoding="utf-8")
        assert written == picture, "run: python docs/drawings"


def test_pictures_are_small_titled_and_have_both_color_schemes(drawings):
    space = "{http://www.w3.org/2000/svg}"
    for name, picture in drawings.pictures().items():
        assert len(picture) < 30_000, name
        root = ElementTree.fromstring(picture)
        assert root.findtext(f"{space}title")
        styles = root.findtext(f"{space}style")
        day, night = styles.split("@media (prefers-color-scheme:dark)")
        used = {
            word
            for element in root.iter()
            for word in element.get("class", "").split()
            if element.tag != f"{space}path"
        }
        for color in used - {"line", "code"}:
            assert f".{color}{{fill:" in day, (name, color)
            assert f".{color}{{fill:" in night, (name, color)


def test_every_picture_is_on_a_page(drawings):
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    shown = set(re.findall(r"pictures/(\w+\.svg)\)", pages))
    assert shown == set(drawings.pictures())


def test_drawn_credit_equals_gae(drawings):
    reward = torch.ones(1, drawings.credit.STEPS, 1, 1)
    last = torch.zeros_like(reward, dtype=torch.bool)
    last[:, -1] = True
    zero = torch.zeros_like(reward)
    _, target = gae(reward, zero, zero, last, last, gamma=drawings.credit.GAMMA, lmbda=1.0)
    assert drawings.credit.credit()["team"] == pytest.approx(target[0, 0].item(), rel=1e-6)


def test_text_outside_the_picture_or_its_box_raises(drawings):
    drawing = drawings.Drawing(100, 50, "small")
    with pytest.raises(ValueError, match="would leave the paper"):
        drawing.words(60, 10, "far too long")
    with pytest.raises(ValueError, match="expected at most 30"):
        drawing.box(0, 0, 30, 10, "blue", "too long for it")
