"""
The CRC32C of concatenated pieces of data, computed from the pieces' own CRC32Cs. No data is read.

A CRC is a remainder of polynomials over GF(2), with the highest bit for the lowest power. Each byte that
follows multiplies the checksum before it by x^8, which is a linear map of its 32 bits. The maps of 1, 2,
4, 8 ... bytes are 32 by 32 matrices of bits. Each is the square of the one before, and a length of n
bytes takes one of them for each bit that is set in n.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

_Matrix: TypeAlias = tuple[int, ...]
"""The columns of a matrix: the image of each of the 32 bits, the lowest first."""

_POLYNOMIAL = 0x82F63B78  # CRC32C's, bits reversed.
_BITS = 32
_DOUBLINGS_TO_A_BYTE = 3


def combine_crc32c(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32C of two concatenated pieces of data; *second_bytes* is the second one's length."""
    moved, power = first, 0
    while second_bytes >> power:
        if second_bytes >> power & 1:
            moved = _applied(_map_of_bytes(power), moved)
        power += 1
    return moved ^ second


def combined_crc32c(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC32C of all *pieces*, given as (CRC32C, length in bytes)."""
    whole = 0
    for crc32c, size_bytes in pieces:
        whole = combine_crc32c(whole, crc32c, size_bytes)
    return whole


@lru_cache(maxsize=64)
def _map_of_bytes(power: int) -> _Matrix:
    """Return the map of 2 to the *power* bytes on a checksum before them."""
    if power == 0:
        # For one bit: each bit moves one power up, and the highest power becomes the polynomial.
        matrix: _Matrix = (_POLYNOMIAL, *(1 << bit for bit in range(_BITS - 1)))
        for _ in range(_DOUBLINGS_TO_A_BYTE):
            matrix = _squared(matrix)
        return matrix
    return _squared(_map_of_bytes(power - 1))


def _squared(matrix: _Matrix) -> _Matrix:
    return tuple(_applied(matrix, column) for column in matrix)


def _applied(matrix: _Matrix, bits: int) -> int:
    result, row = 0, 0
    while bits:
        if bits & 1:
            result ^= matrix[row]
        bits >>= 1
        row += 1
    return result
