"""Permutes whole numbers without a table: the number at any place, in constant time and memory."""

import math

import numpy as np

# Fewer leave orders of five or six samples uneven; `tests/data/test_permutation.py` sees it.
_ROUNDS = 16


def round_keys(seed: int, number: int) -> np.ndarray:
    """Returns the keys of permutation `number` of a seed: raw uint64 numbers of Philox, which NEP 19 keeps."""
    return np.random.Philox(key=[seed, number]).random_raw(_ROUNDS)


def permuted(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns the numbers at these places of a permutation of `range(size)`.

    A Feistel network over pairs of digits, whose bases multiply to a little more than `size`; what falls outside is
    permuted again, until it is inside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). It computes
    with 64-bit whole numbers alone, so that it is the same everywhere.

    Args:
        places: from 0 to `size - 1`, of any shape.
        size: of the permutation, less than 2**62.
        keys: of `round_keys`.

    Returns:
        int64, in the shape of `places`.
    """
    # With an even base, both even and odd permutations come up.
    left_base = math.isqrt(size - 1) + 1
    right_base = -(-size // left_base)
    bases = np.uint64(left_base), np.uint64(right_base + right_base % 2)
    numbers = _shuffled(places.astype(np.uint64), bases, keys)
    while (outside := numbers >= size).any():
        numbers[outside] = _shuffled(numbers[outside], bases, keys)
    return numbers.astype(np.int64)


def _shuffled(numbers: np.ndarray, bases: tuple[np.uint64, np.uint64], keys: np.ndarray) -> np.ndarray:
    left_base, right_base = bases
    left, right = numbers // right_base, numbers % right_base
    for left_key, right_key in keys.reshape(-1, 2):
        left = left + _hashed(right ^ left_key, left_base)
        left -= left_base * (left >= left_base)
        right = right + _hashed(left ^ right_key, right_base)
        right -= right_base * (right >= right_base)
    return left * right_base + right


def _hashed(numbers: np.ndarray, base: np.uint64) -> np.ndarray:
    """Returns a number from 0 to `base - 1` for each, by the mixing of SplitMix64 (Steele, Lea and Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((numbers >> np.uint64(32)) * base) >> np.uint64(32)
