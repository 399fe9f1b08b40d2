"""How many tokens an image is, by its width and height."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

TILE: Final = 512
TILED_BOX: Final = 2048
TILED_SIDE: Final = 768
"""OpenAI's tiles, and how an image is scaled before it is cut into them."""


class ImageRule(Protocol):
    """Counts the tokens of an image."""

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image of this size in pixels."""


@dataclass(frozen=True, slots=True)
class Flat:
    """The same for an image of any size."""

    each: int

    def tokens(self, width: int, height: int) -> int:  # noqa: ARG002  as for the others
        """Return the tokens of an image."""
        return self.each


@dataclass(frozen=True, slots=True)
class ByArea:
    """One token for a number of pixels."""

    pixels: int

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image."""
        return math.ceil(width * height / self.pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTiles:
    """Tokens for an image, and for each tile after it was scaled down."""

    base: int
    each: int

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image."""
        scale = min(1, TILED_BOX / max(width, height))
        # The smaller one results from OpenAI's two steps: into the box, then to the shorter side.
        scale = min(scale, TILED_SIDE / min(width, height))
        number = math.ceil(width * scale / TILE) * math.ceil(height * scale / TILE)
        return self.base + self.each * number


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedTiles:
    """Tiles of a size, without scaling; a small image is one."""

    each: int
    small: int
    tile: int

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image."""
        if max(width, height) <= self.small:
            return self.each
        return self.each * math.ceil(width / self.tile) * math.ceil(height / self.tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePatches:
    """Tokens per square patch, up to a number of patches."""

    side: int
    most: int
    factor: float = 1.0
    edge: float = math.inf
    """The longer edge after scaling down, in pixels."""

    def tokens(self, width: int, height: int) -> int:
        """Return the tokens of an image."""
        scale = min(1, self.edge / max(width, height))
        number = math.prod(math.ceil(each * scale / self.side) for each in (width, height))
        return math.ceil(min(number, self.most) * self.factor)


IMAGE_RULES: Final[Mapping[str, Callable[..., ImageRule]]] = {
    "flat": Flat,
    "by_area": ByArea,
    "tiles": ImageTiles,
    "fixed_tiles": FixedTiles,
    "patches": ImagePatches,
}
"""By their names in the files of vendors."""
