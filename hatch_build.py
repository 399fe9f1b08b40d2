"""Makes the description that a package index shows: the README without what only a checkout has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE: Final = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)[^)]*\)")
"""A link or a picture that leads to a file beside the README, or to a part of it."""


class IndexDescription(MetadataHookInterface):
    """Leaves pictures their descriptions, and links their words.

    An index shows the description alone: it has no files beside it, and no anchors. No repository
    is known whose addresses could take their place.
    """

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = RELATIVE.sub(lambda found: f"*{found[2]}*" if found[1] else found[2], readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
