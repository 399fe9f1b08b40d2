"""The picture of the page shows what the command draws."""

from __future__ import annotations

import html
import re
import time
from typing import TYPE_CHECKING

from tests.top.picture import PICTURE, lines

if TYPE_CHECKING:
    import pytest


def test_the_picture_is_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m tests.generate images` when this fails."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        drawn = ["".join(line.split()) for line in lines()]
    finally:
        monkeypatch.undo()
        time.tzset()
    picture = PICTURE.read_text(encoding="utf-8")
    texts = re.findall(r"<text [^>]*y=\"([\d.]+)\"[^>]*>([^<]*)</text>", picture)
    shown: dict[str, str] = {}
    for y, text in texts[1:]:  # the first is the title of the window
        shown[y] = shown.get(y, "") + html.unescape(text).replace("\xa0", " ")
    assert ["".join(text.split()) for text in shown.values()] == drawn
    assert "http" not in re.sub(r"xmlns=\S+|<!--.*?-->", "", picture)
