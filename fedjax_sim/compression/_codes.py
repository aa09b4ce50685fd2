"""Lossy codes for updates, applied to the vector of all entries."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Count, Fraction, NonNegative, Part
from fedjax_sim.base.ranges import Clusters


class Compressor(Part):
    """A lossy code for a whole update, with all parameters in one vector."""

    def compress(self, key: Array, x: Array, /) -> Array:
        """Returns ``x f32[n]`` as the receiver decodes it, ``f32[n]``."""
        raise NotImplementedError

    def bytes(self, n: int, /) -> int:
        """Returns the size of a message of n entries; if the code is ``measured``, the maximum."""
        raise NotImplementedError

    @property
    def measured(self) -> bool:
        """Whether the size of a message depends on its entries, see ``measure``."""
        return False

    def measure(self, key: Array, x: Array, /) -> tuple[Array, Array | int]:
        """Returns the result of ``compress``, and the bytes of the message, ``int32[]``."""
        return self.compress(key, x), self.bytes(x.size)


class _Sparse(Compressor):
    """A code that sends the largest entries: ``value_bits`` for each, and ``head_bits`` once."""

    sparsity: Fraction

    value_bits, head_bits = 32, 0

    def count(self, n: int) -> int:
        """Returns k, the number of entries that are sent."""
        return max(1, round(self.sparsity * n))

    def bytes(self, n: int) -> int:
        count = self.count(n)
        bits = count * (position_bits(count / n) + self.value_bits) + self.head_bits
        return math.ceil(bits / 8)


class ternary(_Sparse):
    r"""The signs of the largest entries times their mean magnitude (sparse ternary compression).

    .. math:: C(x)_i = \mu \operatorname{sign}(x_i) \text{ if } i \in K \text{ else } 0, \qquad
              \mu = \frac1k \sum_{i \in K} |x_i|, \quad k = \max(1, \operatorname{round}(p n))

    with K the k entries of largest magnitude, the first ones among equals. A message is the k
    positions, Golomb-coded (``position_bits``), k signs and μ in 32 bits.

    Args:
        sparsity: p, the fraction of an update's entries that is sent.

    Raises:
        ValueError: if sparsity is out of range.

    Source: Sattler et al. 2019 <https://arxiv.org/abs/1903.02891>, Algorithm 1.

    >>> x = jnp.array([1.0, -4.0, 0.5, 2.0])
    >>> ternary(0.5).compress(jax.random.key(0), x).tolist()
    [0.0, -3.0, 0.0, 3.0]
    >>> ternary(1 / 400).bytes(1_000_000), 4 * 1_000_000
    (3477, 4000000)
    """

    value_bits, head_bits = 1, 32

    def compress(self, key: Array, x: Array) -> Array:
        count = self.count(x.size)
        largest = _largest(x, count)
        magnitude = jnp.sum(jnp.where(largest, jnp.abs(x), 0)) / count
        return jnp.where(largest, magnitude * jnp.sign(x), 0)


class top_k(_Sparse):
    r"""The largest entries, unchanged.

    .. math:: C(x)_i = x_i \text{ if } i \in K \text{ else } 0

    K as in :func:`ternary`. A message is the k positions, Golomb-coded, and k values of 32 bits.

    Args:
        sparsity: p, the fraction of an update's entries that is sent; 1 changes nothing.

    Raises:
        ValueError: if sparsity is out of range.

    Source: Aji, Heafield 2017 <https://arxiv.org/abs/1704.05021>.

    >>> top_k(0.5).compress(jax.random.key(0), jnp.array([1.0, -4.0, 0.5, 2.0])).tolist()
    [0.0, -4.0, 0.0, 2.0]
    """

    def compress(self, key: Array, x: Array) -> Array:
        return jnp.where(_largest(x, self.count(x.size)), x, 0)


class hard_threshold(Compressor):
    r"""The entries of at least a given magnitude, unchanged (hard-threshold sparsifier).

    .. math:: C(x)_i = x_i \text{ if } |x_i| \ge \lambda \text{ else } 0

    The number k of entries that are sent depends on the update. A message is k in 32 bits, the
    Golomb code of the gaps between the positions, whose parameter is the best one for k of n random
    positions, and k values of 32 bits; it is all n values if that is less. With error feedback the
    threshold stays the same while updates shrink, so the total error is smaller than with
    :func:`top_k` for the same bytes.

    Args:
        threshold: λ, in units of the update; 0 sends all entries.

    Raises:
        ValueError: if threshold is negative.

    Source: Sahu et al. 2021 <https://arxiv.org/abs/2108.00951>, section 4.

    >>> code, x = hard_threshold(1.0), jnp.array([0.5, -4.0, 0.5, 0.1, 0.9, 0.2, 1.0, 0.3])
    >>> kept, size = code.measure(jax.random.key(0), x)
    >>> kept.tolist(), int(size)  # the gaps 1 and 4 take 3 bits each
    ([0.0, -4.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0], 13)
    """

    threshold: NonNegative

    measured = True

    def compress(self, key: Array, x: Array) -> Array:
        return jnp.where(jnp.abs(x) >= self.threshold, x, 0)

    def bytes(self, n: int) -> int:
        return 4 * n

    def measure(self, key: Array, x: Array) -> tuple[Array, Array]:
        sent, place = jnp.abs(x) >= self.threshold, jnp.arange(x.size, dtype=jnp.int32)
        count = jnp.sum(sent, dtype=jnp.int32)
        last = jax.lax.cummax(jnp.where(sent, place, -1))
        before = jnp.concatenate([jnp.full(1, -1, jnp.int32), last[:-1]])
        most = jnp.array([int(x.size * share) for share in _SHARES], jnp.int32)
        fixed = jnp.sum(count <= most, dtype=jnp.int32)
        unary = jnp.sum(jnp.where(sent, (place - before - 1) >> fixed, 0), dtype=jnp.int32)
        bits = count * (1 + fixed) + unary
        rest = self.bytes(x.size) - 4 * count  # compared with this, no sum exceeds the integers
        return self.compress(key, x), 4 * count + jnp.minimum(4 + (bits + 7) // 8, rest)


class entropy_coded(Compressor):
    r"""A quantiser whose levels are entropy-coded, as by an arithmetic or a Huffman code.

    .. math:: \text{bytes} = \Bigl\lceil \tfrac18 \sum_{v} c_v \log_2 \frac{n}{c_v} \Bigr\rceil
              + 8\, |\{v : c_v > 0\}|

    with :math:`c_v` the number of entries that the receiver decodes as the value v. The sum is
    Shannon's bound for codes of single entries, which an arithmetic code reaches up to a few bits
    and a Huffman code up to one bit for each entry; the second term is the table of values and
    counts, in 32 bits each. A message that the quantiser itself codes in fewer bytes is sent as it
    is. The values of a rotated or masked update differ in all entries: use
    ``rotated(entropy_coded(code))``.

    Args:
        code: the quantiser, such as :func:`stochastic_quantisation`.

    Raises:
        ValueError: if the code is one whose size depends on the data itself.

    Source: Shannon 1948 <https://doi.org/10.1002/j.1538-7305.1948.tb01338.x>, for the bound.

    >>> code, x = entropy_coded(ternary(1 / 16)), jnp.arange(65536.0)
    >>> int(code.measure(jax.random.key(0), x)[1]), code.bytes(65536), 4 * 65536
    (2780, 3322, 262144)
    """

    code: Compressor

    measured = True

    def __post_init__(self) -> None:
        if self.code.measured:
            raise ValueError(f"code must have messages of one size, got {self.code}")

    def compress(self, key: Array, x: Array) -> Array:
        return self.code.compress(key, x)

    def bytes(self, n: int) -> int:
        return self.code.bytes(n)

    def measure(self, key: Array, x: Array) -> tuple[Array, Array]:
        given, most = self.compress(key, x), self.bytes(x.size)
        values = jnp.sort(given)
        new = jnp.concatenate([jnp.ones(1, bool), values[1:] != values[:-1]])
        place = jnp.arange(x.size, dtype=jnp.int32)
        count = place + 1 - jax.lax.cummax(jnp.where(new, place, 0))  # of equal values so far
        last = jnp.concatenate([new[1:], jnp.ones(1, bool)])
        times = count.astype(jnp.float32)
        bits = jnp.sum(jnp.where(last, times * jnp.log2(x.size / times), 0))
        distinct = jnp.sum(new, dtype=jnp.int32)
        table = 8 * jnp.minimum(distinct, most // 8)  # no sum exceeds the integers
        # A logarithm that is not exact must not add a byte.
        coded = jnp.minimum(jnp.ceil(bits / 8 - 1e-3), most).astype(jnp.int32)
        shorter = table + jnp.minimum(coded, most - table)
        return given, jnp.where(distinct > most // 8, most, shorter)


class clustered(Compressor):
    r"""The entries of another code, each replaced by the nearest of L values found by k-means.

    .. math:: C(x)_i = \arg\min_{v \in V} |x_i - v|, \qquad
              V = \arg\min_{|V| = L} \sum_i \min_{v \in V} (x_i - v)^2

    V starts evenly spaced from the least to the largest entry; ten iterations of Lloyd's algorithm
    follow, which find a local minimum. A message is L values in 32 bits and
    :math:`\lceil \log_2 L \rceil` bits for each entry. FedZip is
    ``entropy_coded(clustered(top_k(0.3), 3))``, in which most entries are 0; the paper codes each
    layer by itself.

    Args:
        code: the first code, such as ``top_k(0.3)``.
        levels: L.

    Raises:
        ValueError: if levels is out of range.

    Source: Malekijoo et al. 2021 <https://arxiv.org/abs/2102.01593> (FedZip).

    >>> x = jnp.array([1.0, -4.0, 0.5, 2.0])
    >>> clustered(top_k(0.75), 3).compress(jax.random.key(0), x).tolist()
    [1.5, -4.0, 0.0, 1.5]
    """

    code: Compressor
    levels: Clusters

    def compress(self, key: Array, x: Array) -> Array:
        x = self.code.compress(key, x)

        def nearest(values: Array) -> Array:
            return jnp.searchsorted((values[1:] + values[:-1]) / 2, x)

        def lloyd(i: Array, values: Array) -> Array:
            place = nearest(values)
            count = jnp.zeros(self.levels, x.dtype).at[place].add(1)
            total = jnp.zeros(self.levels, x.dtype).at[place].add(x)
            return jnp.where(count > 0, total / jnp.maximum(count, 1), values)

        first = jnp.linspace(jnp.min(x), jnp.max(x), self.levels, dtype=x.dtype)
        values = jax.lax.fori_loop(0, 10, lloyd, first)
        return values[nearest(values)]

    def bytes(self, n: int) -> int:
        return math.ceil(n * math.ceil(math.log2(self.levels)) / 8) + 4 * self.levels


class stochastic_quantisation(Compressor):
    r"""Unbiased stochastic rounding of every entry to one of s levels of the norm (QSGD).

    .. math:: C(x)_i = \lVert x \rVert_2 \operatorname{sign}(x_i)\,\xi_i, \qquad
              \xi_i \in \{\tfrac{l}{s}, \tfrac{l+1}{s}\}, \quad
              \mathbb{E}\,\xi_i = \frac{|x_i|}{\lVert x \rVert_2}

    A message is the norm in 32 bits and a code of fixed length for each entry,
    :math:`\lceil \log_2(2s+1) \rceil` bits; the paper's Elias code is shorter if most entries are
    0, as is :func:`entropy_coded`. Its error can exceed the entry itself: use it without
    feedback.

    Args:
        levels: s, the number of levels between 0 and the norm.

    Raises:
        ValueError: if levels is out of range.

    Source: Alistarh et al. 2017 <https://arxiv.org/abs/1610.02132>, section 3.1.

    >>> stochastic_quantisation(1).compress(jax.random.key(0), jnp.array([0.0, -2.0])).tolist()
    [0.0, -2.0]
    >>> stochastic_quantisation(7).bytes(1000)
    504
    """

    levels: Count

    def compress(self, key: Array, x: Array) -> Array:
        # Scaled so that the norm's square is in the range of floats; a power of two is exact.
        unit = jnp.ldexp(jnp.ones((), x.dtype), jnp.frexp(jnp.max(jnp.abs(x)))[1] - 1)
        x = x / unit
        norm = jnp.linalg.norm(x)
        scaled = self.levels * jnp.abs(x) / jnp.where(norm > 0, norm, 1)
        up = jax.random.uniform(key, x.shape, x.dtype) < scaled - jnp.floor(scaled)
        level = jnp.floor(scaled) + up.astype(x.dtype)
        return norm * jnp.sign(x) * level / self.levels * unit

    def bytes(self, n: int) -> int:
        return math.ceil((n * math.ceil(math.log2(2 * self.levels + 1)) + 32) / 8)


def position_bits(share: float) -> float:
    r"""Returns the bits of one Golomb-coded position if a random fraction of the entries is sent.

    .. math:: b^* + \frac{1}{1 - (1-p)^{2^{b^*}}}, \qquad
              b^* = 1 + \Bigl\lfloor \log_2 \frac{\log(\varphi - 1)}{\log(1-p)} \Bigr\rfloor

    with p = ``share`` and φ the golden ratio; b* is at least 0, and a position takes 0 bits if all
    entries are sent.

    Source: Sattler et al. 2019 <https://arxiv.org/abs/1903.02891>, on Golomb encoding.

    >>> round(position_bits(1 / 400), 2)
    10.11
    """
    if share == 1:
        return 0.0
    fixed = sum(share <= most for most in _SHARES)
    return float(fixed + 1 / (1 - (1 - share) ** 2**fixed))


_SHARES = [-math.expm1(math.log((math.sqrt(5) - 1) / 2) / 2**bits) for bits in range(31)]
"""The largest shares of positions for which the best Golomb code has more fixed bits."""


def _largest(x: Array, count: int) -> Array:
    """Returns whether each entry of ``x`` is one of the ``count`` largest in magnitude."""
    if count == x.size:
        return jnp.ones(x.shape, bool)
    # Nonnegative floats are ordered like their bits: 31 passes find the count-th largest bit by
    # bit. 1.6 M entries on a CPU core take 20 ms for any count; top_k takes 16 ms for 1/400 of them
    # and 390 ms for half; a sort takes 410 ms.
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)

    def refine(i: Array, bound: Array) -> Array:
        higher = bound | (jnp.int32(1) << (30 - i))
        return jnp.where(jnp.sum(bits >= higher, dtype=jnp.int32) >= count, higher, bound)

    bound = jax.lax.fori_loop(0, 31, refine, jnp.int32(0))
    above, tied = bits > bound, bits == bound
    room = count - jnp.sum(above, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, dtype=jnp.int32) <= room))
