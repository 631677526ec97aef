"""Float blocks to codes and scales, a cache-sized tile at a time.

Knows one tile of blocks; how a matrix is cut into them is `reference.quantize`'s.
"""

import numpy as np
from numpy.typing import NDArray

# Where the block's largest element is tried, as multiples of the most negative code. Mean squared
# error over variance, 2^20 Gaussian weights, 4 bits, blocks of 32 / 64 / 128:
#   absmax -> 7                     9.4e-3 / 11.6e-3 / 13.7e-3
#   signed absmax -> -8 (Q4_0)      7.4e-3 /  9.0e-3 / 10.6e-3
#   these five, least-squares scale 6.6e-3 /  8.2e-3 /  9.4e-3
# 2 bits have few codes: absmax 0.121 / 0.142 / 0.160, these four 0.112 / 0.127 / 0.137. With 8
# bits a search gains 5 % of an error of 2.8e-5: not worth five times the work.
_STRETCHES: dict[int, tuple[float, ...]] = {
    2: (1.0, 1.25, 1.5, 1.75),
    4: (1.0, 0.9375, 1.0625, 0.875, 1.125),
    8: (1.0,),
}

# Which parts of a block's range are tried with zero points, and how often the scale of each is
# fitted. A narrower range cuts off its ends. 2 bits lose by theirs 0.111 / 0.126 / 0.136 of the
# variance, by those of 4 bits 0.112 / 0.129 / 0.141.
_USUAL_RANGES = (1.0, 0.92, 0.84, 0.76)
_RANGES: dict[int, tuple[float, ...]] = {
    2: (1.0, 0.85, 0.7, 0.55),
    4: _USUAL_RANGES,
    8: _USUAL_RANGES,
}
_FITS = 2

# Below this the scale's reciprocal overflows; such a block is zero for every purpose.
_SMALLEST_PEAK = 1e-35


class RoundingTile:
    """Scratch of one thread: blocks lie in columns, so every pass is a long run over rows.

    Reductions over 32 neighbours cost numpy 1.6 ns per element, over 32 rows 0.08.
    """

    def __init__(
        self,
        bits: int,
        block_size: int,
        width: int,
        dtype: np.dtype[np.generic],
        *,
        has_zeros: bool = False,
    ) -> None:
        self.bits = bits
        self.has_zeros = has_zeros
        self.low = float(-(1 << (bits - 1)))
        # Past the end of a short tile lie zeros or an earlier tile: rounded too, but never read.
        self.source = np.zeros((block_size, width), dtype)
        self.weights = np.empty((block_size, width), np.float32)
        self.rounded = np.empty_like(self.weights)
        self.products = np.empty_like(self.weights)
        self.codes = np.empty((block_size, width), np.uint8)
        self.packed = np.empty((block_size * bits // 8, width), np.uint8)
        self.importance: NDArray[np.float32] | None = None

    def quantize(
        self,
        blocks: NDArray[np.generic],
        codes: NDArray[np.uint8],
        scales: NDArray[np.float32],
        zero_points: NDArray[np.uint8] | None = None,
    ) -> None:
        """blocks [n, block_size] into codes [n, bytes], scales [n] and, where this has them, zero
        points [n], written in place."""
        count = len(blocks)
        as_bits = np.dtype(f"u{blocks.dtype.itemsize}")  # bits move faster than ml_dtypes scalars
        self.source.view(as_bits)[:, :count] = blocks.view(as_bits).T
        with np.errstate(over="ignore"):  # float64 past float32's range becomes infinity, refused
            np.copyto(self.weights, self.source, casting="same_kind")
        if self.has_zeros:
            assert zero_points is not None
            scales[:], zero_points[:] = (each[:count] for each in self._with_zeros())
        else:
            scales[:] = self._symmetric()[:count]
        self.write_codes(codes)

    def fit(
        self, weights: NDArray[np.float32], importance: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The scales and zero points [width] of blocks in columns [block_size, width].

        They have the least squared error that the same search finds, where the error of a block's
        element i counts importance[i] times; all of these are above 0. The codes are the caller's
        to choose, and are left in `rounded` for `write_codes`.
        """
        np.copyto(self.weights, weights)
        self.importance = importance[:, None]
        if self.has_zeros:
            return self._with_zeros()
        scales = self._symmetric()
        return scales, np.full_like(scales, -self.low)

    def write_codes(self, codes: NDArray[np.uint8]) -> None:
        """Packs the codes in `rounded` into codes [n, bytes]."""
        count = len(codes)
        np.copyto(self.codes, self.rounded, casting="unsafe")
        if self.bits == 8:
            codes[:] = self.codes[:, :count].T
            return
        per_byte = 8 // self.bits
        np.copyto(self.packed, self.codes[::per_byte])
        for place in range(1, per_byte):
            shifted = self.codes[place::per_byte]
            np.left_shift(shifted, np.uint8(self.bits * place), out=shifted)
            np.bitwise_or(self.packed, shifted, out=self.packed)
        codes[:] = self.packed[:, :count].T

    def _symmetric(self) -> NDArray[np.float32]:
        """Leaves the codes in `rounded`; the scales [width]."""
        unit = self._normalize()
        stretch, ratio = self._search()
        np.multiply(self.weights, stretch, out=self.rounded)
        self._round()
        self.rounded -= np.float32(self.low)
        np.multiply(unit, ratio, out=unit)
        return unit

    def _with_zeros(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Leaves the codes in `rounded`; the scales and the zero points [width]."""
        highest, lowest = self.weights.max(axis=0), self.weights.min(axis=0)
        if not (np.isfinite(highest).all() and np.isfinite(lowest).all()):
            raise ValueError("the weight holds NaN or infinity, which no code stands for")
        peak = np.maximum(highest, -lowest)
        peak[peak < _SMALLEST_PEAK] = 0
        inverse = np.divide(1, peak, out=np.zeros_like(peak), where=peak != 0)
        np.multiply(self.weights, inverse, out=self.weights)  # so that squares do not overflow
        last = np.float32((1 << self.bits) - 1)
        np.maximum(highest * inverse, 0, out=highest)
        np.minimum(lowest * inverse, 0, out=lowest)
        reach = (highest - lowest) / last
        reach[peak == 0] = 1
        zeros = np.rint(np.clip(-lowest / reach, 0, last))
        best_gain, best_scale = np.full(reach.shape, -1, np.float32), reach.copy()
        best_fit = reach.copy()
        for part in _RANGES[self.bits]:
            scale = reach * np.float32(part)
            for _ in range(_FITS):
                self._round_from_zero(scale, zeros, last)
                fit, gain = self._fit()
                better = gain > best_gain
                np.copyto(best_gain, gain, where=better)
                np.copyto(best_scale, scale, where=better)
                np.copyto(best_fit, fit, where=better)
                scale = np.maximum(fit, reach * np.float32(0.1))
        self._round_from_zero(best_scale, zeros, last)
        self.rounded += zeros
        return best_fit * peak, zeros

    def _round_from_zero(
        self, scale: NDArray[np.float32], zeros: NDArray[np.float32], last: np.float32
    ) -> None:
        """Leaves codes less their zero points in `rounded`."""
        np.multiply(self.weights, 1 / scale, out=self.rounded)
        np.rint(self.rounded, out=self.rounded)
        np.clip(self.rounded, -zeros, last - zeros, out=self.rounded)

    def _normalize(self) -> NDArray[np.float32]:
        """Divides each block so that its peak becomes `low`; returns the divisors [width]."""
        highest, lowest = self.weights.max(axis=0), self.weights.min(axis=0)
        if not (np.isfinite(highest).all() and np.isfinite(lowest).all()):
            raise ValueError("the weight holds NaN or infinity, which no code stands for")
        peak = np.where(highest > -lowest, highest, lowest)
        peak[np.abs(peak) < _SMALLEST_PEAK] = 0
        inverse = np.divide(self.low, peak, out=np.zeros_like(peak), where=peak != 0)
        np.multiply(self.weights, inverse, out=self.weights)
        unit: NDArray[np.float32] = peak / np.float32(self.low)
        return unit

    def _search(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The best stretch [width] and the least-squares scale [width], of normalised weights.

        The best is that of the most gain.
        """
        width = self.weights.shape[1]
        best_gain, best_stretch, best_ratio = np.zeros((3, width), np.float32)
        for stretch in _STRETCHES[self.bits]:
            np.multiply(self.weights, np.float32(stretch), out=self.rounded)
            self._round()
            ratio, gain = self._fit()
            better = gain > best_gain
            np.copyto(best_gain, gain, where=better)
            np.copyto(best_stretch, np.float32(stretch), where=better)
            np.copyto(best_ratio, ratio, where=better)
        return best_stretch, best_ratio

    def _fit(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The least-squares scale [width] of what is in `rounded`, and what that gains.

        The squared error of codes c at their best scale is sum(w w) - sum(w c)^2 / sum(c c), where
        each term is multiplied by the element's importance.
        """
        mixed, square = self._weighted_sum(self.weights), self._weighted_sum(self.rounded)
        # A zero block: 0 / 1. No other has a smaller square than one code of 1.
        least = np.float32(1 if self.importance is None else self.importance.min())
        scale: NDArray[np.float32] = np.divide(mixed, np.maximum(square, least))
        return scale, mixed * scale

    def _weighted_sum(self, factors: NDArray[np.float32]) -> NDArray[np.float32]:
        """The sum of factors times `rounded` over each block [width]."""
        np.multiply(factors, self.rounded, out=self.products)
        if self.importance is not None:
            np.multiply(self.products, self.importance, out=self.products)
        total: NDArray[np.float32] = np.add.reduce(self.products, axis=0)
        return total

    def _round(self) -> None:
        np.rint(self.rounded, out=self.rounded)
        np.clip(self.rounded, np.float32(self.low), np.float32(-self.low - 1), out=self.rounded)
