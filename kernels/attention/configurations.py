"""Tile sizes of the Triton kernels of attention, by dtype and padded head width.

The first of a list is the one used; operands that descriptors cannot address use the first without descriptors. All
were compiled for sm_90 and their registers read. Of 16-bit tiles some spill up to 130 bytes a thread, query at width
256 up to 200, and are faster (measured) than those that do not; float32 query at 256 spills 208, key_value with
statistics at 64, 32.
"""

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    rows: int  # queries of a tile
    keys: int
    warps: int
    stages: int
    descriptors: bool = False  # loads by the tensor memory accelerator
    registers: int | None = None  # most of a thread, so that one more program fits a multiprocessor


Table = dict[int, list[Tiles]]  # by the largest padded head width

FORWARD: Table = {
    64: [
        Tiles(64, 128, 4, 2, True, 168),
        Tiles(64, 64, 4, 3, True),
        Tiles(128, 64, 4, 3, True),
        Tiles(128, 128, 8, 3, True),
        Tiles(128, 128, 8, 3),
    ],
    128: [
        Tiles(64, 64, 4, 3, True),
        Tiles(128, 64, 8, 3, True),
        Tiles(128, 128, 8, 2, True),
        Tiles(64, 128, 4, 2, True),
        Tiles(128, 64, 8, 3),
    ],
    256: [Tiles(128, 64, 8, 2, True), Tiles(64, 64, 4, 2, True), Tiles(128, 64, 8, 2)],
}
KEY_VALUE: Table = {
    64: [
        Tiles(64, 64, 4, 3, True),
        Tiles(64, 128, 8, 2, True),
        Tiles(64, 64, 4, 2, True),
        Tiles(32, 64, 4, 2, True),
        Tiles(64, 128, 8, 2),
    ],
    128: [
        Tiles(64, 64, 4, 2, True),
        Tiles(64, 128, 8, 2, True),
        Tiles(64, 64, 8, 2, True),
        Tiles(32, 128, 8, 2, True),
        Tiles(32, 128, 8, 2),
    ],
    256: [Tiles(64, 64, 8, 1, True), Tiles(32, 64, 8, 1, True), Tiles(32, 32, 8, 1)],
}
QUERY: Table = {
    64: [Tiles(64, 64, 4, 2, True), Tiles(128, 64, 8, 3, True), Tiles(128, 128, 8, 2, True), Tiles(64, 64, 4, 2)],
    128: [Tiles(64, 64, 4, 2, True), Tiles(128, 64, 8, 2, True), Tiles(64, 64, 8, 2, True), Tiles(128, 64, 8, 2)],
    256: [Tiles(64, 32, 4, 1, True), Tiles(64, 32, 4, 2, True), Tiles(32, 32, 4, 1)],
}
# with the gradients of entropy, masses and largest score: more numbers per row, so smaller tiles
KEY_VALUE_STATISTICS: Table = {
    64: [Tiles(64, 64, 4, 2, True), Tiles(32, 128, 8, 2, True), Tiles(32, 64, 4, 2, True), Tiles(32, 64, 4, 2)],
    128: [Tiles(32, 64, 4, 2, True), Tiles(32, 64, 8, 2, True), Tiles(32, 64, 8, 2)],
    256: [Tiles(32, 32, 8, 1)],
}
QUERY_STATISTICS: Table = {
    64: [Tiles(64, 32, 4, 3, True), Tiles(128, 64, 8, 3, True), Tiles(64, 64, 4, 2, True), Tiles(64, 64, 4, 2)],
    128: [Tiles(64, 64, 4, 2, True), Tiles(128, 32, 8, 2, True), Tiles(64, 32, 4, 2, True), Tiles(64, 32, 4, 2)],
    256: [Tiles(32, 32, 4, 1)],
}
MASS: Table = {128: [Tiles(128, 64, 8, 3)], 256: [Tiles(128, 64, 8, 2)]}

# float32 multiplies without tensor cores, and a thread holds whole rows of its operands: small tiles
FORWARD_FP32: Table = {64: [Tiles(64, 32, 8, 1)], 128: [Tiles(32, 32, 8, 1)], 256: [Tiles(32, 16, 8, 1)]}
KEY_VALUE_FP32: Table = {64: [Tiles(32, 32, 8, 1)], 128: [Tiles(16, 32, 8, 1)], 256: [Tiles(16, 16, 8, 1)]}
QUERY_FP32: Table = {64: [Tiles(32, 32, 8, 1)], 128: [Tiles(16, 16, 8, 1)], 256: [Tiles(16, 16, 8, 1)]}

WIDEST = 256
FEW_ROWS = 16  # tile of queries for chosen rows, of which there are few


def _listed(half: Table, single: Table, dtype: torch.dtype, width: int) -> list[Tiles]:
    table = single if dtype == torch.float32 else half
    return table[min(limit for limit in table if limit >= width)]


def forward_tiles(dtype: torch.dtype, width: int) -> list[Tiles]:
    return _listed(FORWARD, FORWARD_FP32, dtype, width)


def key_value_tiles(dtype: torch.dtype, width: int, statistics: bool = False) -> list[Tiles]:
    return _listed(KEY_VALUE_STATISTICS if statistics else KEY_VALUE, KEY_VALUE_FP32, dtype, width)


def query_tiles(dtype: torch.dtype, width: int, statistics: bool = False) -> list[Tiles]:
    return _listed(QUERY_STATISTICS if statistics else QUERY, QUERY_FP32, dtype, width)


def mass_tiles(dtype: torch.dtype, width: int) -> list[Tiles]:
    return _listed(MASS, FORWARD_FP32, dtype, width)


def choose(tiles: list[Tiles], place: int, describable: bool) -> Tiles:
    """The configuration at `place` (the last if the list is shorter), or the first that needs no descriptors."""
    chosen = tiles[min(place, len(tiles) - 1)]
    if describable or not chosen.descriptors:
        return chosen
    return next(tile for tile in tiles if not tile.descriptors)
