"""Pictures of coloured shapes and short texts, equal to the pixel on every machine: every shape is a stencil that is
computed with integers, and the letters are a font of 3 x 5 pixels of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from PIL import Image as Pillow

from TrainingFactory.common.images import image_from_pillow
from TrainingFactory.types import Image

Color = tuple[int, int, int]
Point = tuple[int, int]

PAPER, INK, GRAY = (245, 245, 245), (20, 20, 20), (170, 170, 170)
COLORS: dict[str, Color] = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (45, 80, 215),
    "gold": (235, 190, 40),
    "pink": (240, 130, 190),
    "black": (40, 40, 40),
    "brown": (130, 80, 40),
    "purple": (125, 50, 165),
}
# Whether the pixel x, y of a box of n x n pixels belongs to a shape; x and y are twice the distances from the centre.
SHAPES: dict[str, Callable[[int, int, int], bool]] = {
    "circle": lambda x, y, n: x * x + y * y <= n * n,
    "square": lambda x, y, n: True,
    "triangle": lambda x, y, n: 2 * abs(x) <= n + y,
    "diamond": lambda x, y, n: abs(x) + abs(y) <= n,
    "cross": lambda x, y, n: min(abs(x), abs(y)) * 3 <= n,
    "ring": lambda x, y, n: n * n <= 4 * (x * x + y * y) <= 4 * n * n,
}
LETTER_WIDTH, LETTER_HEIGHT = 3, 5
# Rows of a letter from the top, each an octal digit: 4 is the left pixel, 2 the middle one, 1 the right one.
LETTER_ROWS = {
    "A": "25755", "B": "65656", "C": "34443", "D": "65556", "E": "74647", "F": "74644", "G": "34553", "H": "55755",
    "I": "72227", "J": "11152", "K": "55655", "L": "44447", "M": "57755", "N": "65555", "O": "25552", "P": "65644",
    "Q": "25563", "R": "65655", "S": "34216", "T": "72222", "U": "55557", "V": "55522", "W": "55775", "X": "55255",
    "Y": "55222", "Z": "71247", "0": "75557", "1": "26227", "2": "61247", "3": "61216", "4": "55711", "5": "74616",
    "6": "34757", "7": "71122", "8": "75757", "9": "75716", "?": "61202", " ": "00000",
}  # fmt: skip


class Canvas:
    """RGB picture with methods that draw boxes, shapes and short texts."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self._picture = Pillow.new("RGB", (width, height), PAPER)

    def draw_box(self, corner: Point, size: tuple[int, int], color: Color) -> None:
        left, top = corner
        self._picture.paste(color, (left, top, left + size[0], top + size[1]))

    def draw_shape(self, shape: str, corner: Point, size: int, color: Color) -> None:
        self._picture.paste(color, corner, _make_stencil(shape, size))

    def draw_text(self, text: str, center: Point, scale: int = 1, color: Color = INK) -> None:
        x, y = center[0] - measure_text(text, scale) // 2, center[1] - LETTER_HEIGHT * scale // 2
        for letter in text.upper():
            self._picture.paste(color, (x, y), _draw_letter(letter, scale))
            x += (LETTER_WIDTH + 1) * scale

    def to_image(self) -> Image:
        return image_from_pillow(self._picture)


def measure_text(text: str, scale: int = 1) -> int:
    return (len(text) * (LETTER_WIDTH + 1) - 1) * scale


def make_blank_image(image: Image) -> Image:
    """Return an empty image of the same size."""
    return Canvas(image.width, image.height).to_image()


@cache
def _make_stencil(shape: str, size: int) -> Any:
    is_inside = SHAPES[shape]
    pixels = [
        255 * is_inside(2 * x + 1 - size, 2 * y + 1 - size, size) for y in range(size) for x in range(size)
    ]
    return _make_mask(size, size, pixels)


@cache
def _draw_letter(letter: str, scale: int) -> Any:
    pixels = [255 * (int(row) >> shift & 1) for row in LETTER_ROWS[letter] for shift in (2, 1, 0)]
    mask = _make_mask(LETTER_WIDTH, LETTER_HEIGHT, pixels)
    return mask.resize((LETTER_WIDTH * scale, LETTER_HEIGHT * scale), Pillow.Resampling.NEAREST)


def _make_mask(width: int, height: int, pixels: list[int]) -> Any:
    return Pillow.frombytes("L", (width, height), bytes(pixels))
