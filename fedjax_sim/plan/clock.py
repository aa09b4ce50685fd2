"""Clocks: devices that differ, links, sleep and failures, and what the server waits for.

A law gives each client a number that depends on nothing but the clock's seed and the client's own
number: a million clients cost what the cohort costs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Availability, Clock, Law, Link, Need, Now, part
from fedjax_sim.base.clock import Late
from fedjax_sim.engine.needs import NO_FLIGHT
from fedjax_sim.plan.redistribution import keep

DAY = 86400.0

_KNOWN_AGE = Need(
    "broadcast",
    "models whose staleness is not drawn: in a round they come back when they are done",
    lambda parts: parts.broadcast.tags != "staleness",
    "broadcast=latest()",
)
_BY_SERVER = Need(
    "redistribution",
    "models that clients send to the server, and not to one another",
    lambda parts: not parts.selection.sticky or parts.redistribution is keep,
    "redistribution=keep",
)
_WHOLE = Need(
    "exchange",
    "models without fragments, of which a client that is not there would miss some",
    lambda parts: not parts.exchange.fragments,
    "exchange=everything()",
)
_STOPS = Need(
    "local",
    "an update that can stop early",
    lambda parts: parts.local.stops,
    "local_sgd, or late='drop'",
)


@part
def constant(value: float) -> Law:
    """The same number for all clients.

    Args:
        value: in seconds of a step, or bytes per second.

    Returns:
        A law.

    Raises:
        ValueError: if value is not positive and finite.

    >>> constant(0.5)(jax.random.key(0), jnp.arange(2), Now(jnp.int32(0), jnp.float32(0))).tolist()
    [0.5, 0.5]
    """
    _check_positive("value", value)

    def law(key: Array, client: Array, now: Now) -> Array:
        return jnp.full(client.shape, value, jnp.float32)

    return law


@part
def lognormal(median: float, sigma: float) -> Law:
    r"""Numbers of which the logarithms are normal: :math:`x_k = m\,e^{\sigma z_k}`.

    Args:
        median: m, in seconds of a step, or bytes per second.
        sigma: σ, of the logarithm.

    Returns:
        A law.

    Raises:
        ValueError: if median is not positive and finite, or sigma is not in [0, 10].
    """
    _check_positive("median", median)
    if not 0 <= sigma <= 10:  # 10 is 6e22 times the median for one client in a million
        raise ValueError(f"sigma must be in [0, 10], got {sigma}")

    def law(key: Array, client: Array, now: Now) -> Array:
        z = jax.vmap(lambda own: jax.random.normal(own, (), jnp.float32))(_own(key, client))
        return jnp.float32(median) * jnp.exp(sigma * z)

    return law


@part
def pareto(least: float, alpha: float) -> Law:
    r"""Numbers with a heavy tail: :math:`P(x_k > x) = (x_0 / x)^\alpha` above :math:`x_0`.

    Args:
        least: x₀, in seconds of a step, or bytes per second.
        alpha: α; the mean is infinite up to 1.

    Returns:
        A law.

    Raises:
        ValueError: if least is not positive and finite, or alpha is below 0.5.
    """
    _check_positive("least", least)
    if not 0.5 <= alpha < math.inf:  # below, one client in 2,000 is slower than a run can tell
        raise ValueError(f"alpha must be at least 0.5 and finite, got {alpha}")

    def law(key: Array, client: Array, now: Now) -> Array:
        return jnp.float32(least) * (1 - _uniform(_own(key, client))) ** jnp.float32(-1 / alpha)

    return law


@part
def tiers(*values: float) -> Law:
    """Tiers of devices: each client is in one of them, drawn with equal probability.

    Args:
        values: of each tier, in seconds of a step, or bytes per second.

    Returns:
        A law.

    Raises:
        ValueError: if there is none, or one is not positive and finite.

    >>> drawn = tiers(1, 2, 10)(
    ...     jax.random.key(0), jnp.arange(300), Now(jnp.int32(0), jnp.float32(0))
    ... )
    >>> sorted(set(drawn.tolist()))
    [1.0, 2.0, 10.0]
    """
    if not values:
        raise ValueError("tiers needs at least one value")
    for value in values:
        _check_positive("values", value)

    def law(key: Array, client: Array, now: Now) -> Array:
        tier = jnp.floor(len(values) * _uniform(_own(key, client))).astype(jnp.int32)
        return jnp.array(values, jnp.float32)[jnp.minimum(tier, len(values) - 1)]

    return law


@part
def bandwidth(up: float | Law, down: float | Law, *, shared: bool = False) -> Link:
    r"""What travels how fast, in bytes per second.

    Args:
        up: of each client; if ``shared`` a number, of all clients together.
        down: of each client.
        shared: whether the n clients that upload in a round have an equal part of one uplink:
            B bytes take each of them :math:`B n / \mathrm{up}` seconds.

    Returns:
        A link.

    Raises:
        ValueError: if a number is not positive and finite, or a shared uplink is no number.
    """
    if shared and callable(up):
        raise ValueError("up must be a number for a shared uplink, which is one for all")
    return Link(_law("up", up), _law("down", down), shared)


@part
def bernoulli(p: float) -> Availability:
    """Every client is awake with a probability, in every round anew.

    Args:
        p: the probability.

    Returns:
        An availability.

    Raises:
        ValueError: if p is out of range.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p must be in [0, 1], got {p}")

    def available(keys: Array, client: Array, now: Now) -> Array:
        return _uniform(keys) < p

    return available


@part
def diurnal(share: float, period: float = DAY, *, seed: int = 0) -> Availability:
    r"""Every client is awake for a part of each day, and each begins its day at another time.

    .. math:: (t / T + \varphi_k) \bmod 1 < s, \qquad \varphi_k \sim U(0, 1)

    Args:
        share: s, the part of a day.
        period: T, whole seconds of a day.
        seed: of the φ.

    Returns:
        An availability.

    Raises:
        ValueError: if share is out of range, or period is no whole number of seconds from 1 to
            2³¹ - 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    if period != int(period) or not 1 <= period < 2**31:
        raise ValueError(f"period must be a whole number of seconds from 1, got {period}")

    def available(keys: Array, client: Array, now: Now) -> Array:
        phase = _uniform(_own(jax.random.key(seed), client))
        second = (now.seconds % int(period)).astype(jnp.float32) + now.fraction
        return (second / period + phase) % 1 < share

    return available


@part
def synchronous(
    compute: float | Law,
    link: Link | None = None,
    available: Availability | None = None,
    *,
    failures: float = 0.0,
    deadline: float | None = None,
    late: Late = "drop",
    first: int | None = None,
    idle: float = 60.0,
    watts: float | None = None,
    seed: int = 0,
) -> Clock:
    r"""Rounds that last as long as the slowest visit, or until the server waits no longer.

    .. math:: s_k = \frac{\text{bytes down}}{\text{down}_k} + T_k c_k +
              \frac{\text{bytes up}}{\text{up}_k}, \qquad
              s = \min(\max_k s_k, \text{deadline})

    A client that is asleep is not asked, and its slot is idle. One that is lost falls silent at a
    uniform point of its visit, and the server sees it. Of a client that is lost or late nothing is
    taken: it weighs nothing, keeps what it had before, and a model in flight stays as it was before
    the visit; a model that is due at a client which keeps its slot is lost with it. What was sent
    before the first round and after the last takes no time.

    Args:
        compute: c_k, the seconds of a local step; a number for all.
        link: see :func:`bandwidth`; None: bytes travel in no time.
        available: who is awake when the round begins; None: everyone.
        failures: the probability that a client is lost in the middle of its visit.
        deadline: the seconds of a round at most; None for any number.
        late: what becomes of a client that the deadline finds at work: "drop" drops its upload,
            which is sent all the same; "partial" lets it take the steps that leave time for the
            upload, if that is one at least.
        first: the server waits for so many uploads and drops the others (over-selection); None for
            all.
        idle: the seconds of a round in which no client trains, as all sleep.
        watts: the power of a device that computes; None: energy is not told.
        seed: of the devices. All runs have the same.

    Returns:
        A clock.

    Raises:
        ValueError: if a number is out of range, or there is nothing that ``late`` is for.

    Source: Bonawitz et al. 2019 <https://arxiv.org/abs/1902.01046>, section 2.2, for deadlines and
    over-selection; Li et al. 2020 <https://arxiv.org/abs/1812.06127>, section 3, for partial work.

    Example:
        >>> import fedjax_sim as fs
        >>> fs.clock.synchronous(fs.clock.tiers(1, 2, 10), fs.clock.bandwidth(1e6, 4e6))
        synchronous(tiers(1, 2, 10), link=bandwidth(1000000.0, 4000000.0))
    """
    if not 0 <= failures < 1:
        raise ValueError(f"failures must be in [0, 1), got {failures}")
    for name, value in (("deadline", deadline), ("idle", idle), ("watts", watts)):
        if value is not None:
            _check_positive(name, value)
    if late not in ("drop", "partial"):
        raise ValueError(f"late must be 'drop' or 'partial', got {late!r}")
    if late == "partial" and deadline is None:
        raise ValueError("late='partial' needs a deadline, which clients stop in time for")
    if first is not None and first < 1:
        raise ValueError(f"first must be at least 1, got {first}")
    made = Clock(
        compute=_law("compute", compute),
        link=link,
        available=available,
        failures=failures,
        deadline=deadline,
        late=late,
        first=first,
        idle=idle,
        watts=watts,
        seed=seed,
    )
    needs = [_KNOWN_AGE, _BY_SERVER]
    needs += [_WHOLE] * made.loses + [_STOPS] * made.cuts
    if first is not None:
        enough = Need(
            "schedule",
            f"at least {first} clients to wait for",
            lambda parts: len(parts.schedule.group) >= first,
            "a larger cohort",
        )
        needs += [NO_FLIGHT, enough]
    return made._replace(needs=tuple(needs))


def _law(name: str, given: float | Law) -> Law:
    if callable(given):
        return given
    _check_positive(name, given)
    return constant(given)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def _own(key: Array, client: Array) -> Array:
    """A key for each client, ``key[P]``."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, client)


def _uniform(keys: Array) -> Array:
    return jax.vmap(lambda own: jax.random.uniform(own, (), jnp.float32))(keys)
