"""Any composition of a small grammar as a plain NumPy program: one loop, no classes, no JAX.

Clients minimise ½ Σ_i d_i (w_i - x_ki)², and all samples of client k are the same, so that no order
of samples matters. What is drawn by chance (cohorts, permutations, staleness) is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

N, DIM, STAT = 6, 5, 2
FIRST = 3  # coordinates of the first leaf; the second has the others
SIZES = np.array([3, 8, 5, 12, 2, 9])
LR, BATCH, EPOCHS, ROUNDS = 0.1, 4, 2, 5
MALICIOUS = np.array([False, True, False, False, True, False])
_RNG = np.random.default_rng(7)
CURVE = _RNG.uniform(0.5, 1.5, DIM).astype(np.float32)
TARGETS = _RNG.normal(size=(N, DIM)).astype(np.float32)
START = _RNG.normal(size=DIM).astype(np.float32)


class Drawn(NamedTuple):
    """What chance decided, by round and slot: clients, sources, staleness."""

    client: NDArray[np.int32]
    source: NDArray[np.int32]
    staleness: NDArray[np.int32]


class Outcome(NamedTuple):
    """What a run gives: server models after each round, those evaluated, uploads, the last one."""

    servers: list[Vector]
    evaluated: list[Vector]
    uploads: list[int]
    final: Vector


def loss(w: Vector, k: int) -> float:
    return float(0.5 * np.sum(CURVE * (w[:DIM] - TARGETS[k]) ** 2))


def taken_by_server(spec: dict[str, Any], t: int) -> tuple[int, int, bool]:
    """The coordinates that the server moves in a round, from and to, and whether the statistics."""
    if spec["exchange"] == "fragments":
        return (0, FIRST, False) if t % 2 == 0 else (FIRST, DIM, True)
    return 0, FIRST if spec["exchange"] == "own" else DIM, True


def run(spec: dict[str, Any], drawn: Drawn, start: Vector, clusters: Sequence[Vector]) -> Outcome:
    """The composition ``spec`` in float64; a model is one vector, its statistics at the end."""
    slots, period = drawn.client.shape[1], {"delayed": 2, "staggered": 2}.get(spec["flight"], 1)
    serverless, sticky = spec["flight"] == "serverless", spec["sticky"]
    flight = period > 1 or serverless
    travel = flight and not (sticky and spec["redistribution"] == "keep")
    group = np.arange(slots) // (slots // 2) if spec["flight"] == "staggered" else None

    def due_at(t: int) -> NDArray[np.bool_]:
        if serverless:
            return np.zeros(slots, bool)
        if group is not None:
            return np.asarray(group == t % 2)
        return np.full(slots, (t + 1) % period == 0)

    w, n_t = start.copy(), 0.0
    past, models = [w], [w.copy() for _ in range(slots)]
    left = [w.copy() for _ in range(slots)]
    theta = [c.copy() for c in clusters]
    seen = np.zeros(slots, int)
    in_turn, travels = spec["exchange"] == "fragments", taken_by_server(spec, 1)[1]
    mine = np.tile(start[travels:DIM], (N, 1))
    velocity = np.zeros((N, DIM))
    shared_velocity, c, own_c = np.zeros(DIM), np.zeros(DIM), np.zeros((N, DIM))
    residual = {i: np.zeros((N, travels)) for i in range(len(spec["sending"]))}
    server: dict[str, Vector] = {"v": np.zeros(DIM), "r": np.zeros(DIM)}
    delta = np.zeros(DIM)
    mixture = np.full(N, 1 / N)
    out = Outcome([], [], [], w)
    slot_tag = [0] * slots

    def known() -> list[Vector]:
        """What the server measures the models in flight from."""
        return left if base_is_left(spec) else [w] * slots

    for t in range(ROUNDS):
        fresh = due_at(t - 1) | (t == 0)
        if spec["redistribution"] == "mix" and flight:
            models = list(ring_weights(slots) @ np.array(models))
        elif flight:
            order = drawn.source[t]
            models, left = [models[j] for j in order], [left[j] for j in order]
            seen, slot_tag = seen[order], [slot_tag[j] for j in order]
        clients, received, used, tags = drawn.client[t], [], [], []
        for i, k in enumerate(clients):
            if fresh[i]:
                sent, tag = w, 0
                if spec["broadcast"] == "stale":
                    tag = int(drawn.staleness[t, i])
                    sent = past[len(past) - 1 - tag]
                if spec["broadcast"] == "ifca":
                    tag = int(np.argmin([loss(m, k) for m in theta]))
                    sent = theta[tag]
                left[i] = sent
                seen[i] = 0
            else:
                sent, tag = models[i], slot_tag[i]
                if in_turn:
                    low, high, statistics = taken_by_server(spec, t - 1)
                    sent = sent.copy()
                    sent[low:high] = w[low:high]
                    sent[DIM:] = w[DIM:] if statistics else sent[DIM:]
                if spec["refresh"] == "drift":
                    pull = n_t / (SIZES[k] + n_t)
                    sent = (1 - pull) * sent + pull * w
            received.append(sent)
            used.append(np.concatenate([sent[:travels], mine[k], sent[DIM:]]))
            tags.append(tag)
        slot_tag = tags
        # Local updates.
        trained, messages = [], []
        for k, start_k, came in zip(clients, used, received, strict=True):
            p, s = start_k[:DIM].copy(), start_k[DIM:].copy()
            first = {"reset": np.zeros(DIM), "keep": velocity[k], "average": shared_velocity}
            v, path = first[spec["optimizer_state"]].copy(), np.zeros(DIM)
            count = EPOCHS * math.ceil(SIZES[k] / BATCH)
            for _ in range(count):
                g = CURVE * (p - TARGETS[k])
                path += g / count
                if spec["correction"] == "proximal":
                    g = g + 0.3 * (p - start_k[:DIM])
                if spec["correction"] == "scaffold":
                    g = g - own_c[k] + c
                if spec["correction"] == "client_momentum":
                    g = 0.4 * g + 0.6 * delta
                v = spec["momentum"] * v + g
                p = p - LR * v
                s = 0.5 * s + 0.5 * TARGETS[k, : len(s)]
            mine[k] = p[travels:]
            trained.append(np.concatenate([p[:travels], came[travels:DIM], s]))
            change = path - own_c[k]
            messages.append({"c": change, "v": v})
            if spec["optimizer_state"] == "keep":
                velocity[k] = v
            if spec["correction"] == "scaffold":
                own_c[k] = path
        # What is sent.
        due = due_at(t) | in_turn
        sends = due | travel
        base = received if travel or not flight else known()
        updates = [m - b for m, b in zip(trained, base, strict=True)]
        updates = sent_through(spec, clients, sends, updates, messages, residual)
        if flight and spec["sending"]:
            trained = [
                b + u if sends[i] else m
                for i, (m, b, u) in enumerate(zip(trained, base, updates, strict=True))
            ]
        present = np.ones(slots)
        if spec["optimizer_state"] == "average" and spec["momentum"]:
            weights = weigh(spec["weighting"], SIZES[clients], SIZES[clients])
            shared_velocity = reduce(spec["aggregator"], [m["v"] for m in messages], weights)
        if spec["correction"] == "scaffold":
            mean = reduce(spec["aggregator"], [m["c"] for m in messages], present)
            c = c + slots / N * mean
        seen = seen + SIZES[clients]
        if flight:
            models = trained
        exchanged = 0
        if flight and sticky and spec["redistribution"] != "keep":
            moved = 2 if spec["redistribution"] == "mix" else drawn.source[t] != np.arange(slots)
            exchanged = int(np.sum(np.where(fresh, 0, moved)))
        out.uploads.append(int(np.sum(due | (not sticky))) + exchanged)
        # The server's turn.
        if due.any():
            if flight:
                updates = [m - b for m, b in zip(trained, known(), strict=True)]
            w, theta, mixture = absorb(
                spec, w, theta, mixture, server, np.flatnonzero(due), updates, clients, seen,
                received if not flight else known(), tags, used, t,
            )  # fmt: skip
            n_t = float(np.sum(SIZES[clients[due]]))
            counts = np.array([accumulated(spec["momentum"], k) for k in clients[due]])
            delta = -server["aggregate"][:DIM] / (LR * (server["share"] @ counts))
            past = [*past, w][-3:]
        out.servers.append(w)
        out.evaluated.append(w)
        if flight and (serverless or spec["evaluated"] == "in_flight"):
            weights = weigh(spec["weighting"], SIZES[clients], seen)
            out.evaluated[-1] = w + reduce(spec["aggregator"], [m - w for m in models], weights)
    final = w
    if flight and not due.all() and not in_turn:
        rest = ~due & (not travel)
        updates = [m - b for m, b in zip(models, known(), strict=True)]
        updates = sent_through(spec, clients, rest, updates, [], residual)
        final, *_ = absorb(
            spec, w, theta, mixture, server, np.arange(slots), updates, clients, seen, known(),
            tags, used, t,
        )  # fmt: skip
    return out._replace(final=final)


def absorb(
    spec: dict[str, Any],
    w: Vector,
    theta: list[Vector],
    mixture: Vector,
    server: dict[str, Vector],
    rows: NDArray[np.int64],
    updates: list[Vector],
    clients: NDArray[np.int32],
    seen: NDArray[np.int64],
    origin: list[Vector],
    tags: list[int],
    used: list[Vector],
    t: int,
) -> tuple[Vector, list[Vector], Vector]:
    """The server model, the clusters and AFL's mixture after the models ``rows``."""
    weights = weigh(spec["weighting"], SIZES[clients], seen)[rows]
    start = [origin[i] for i in rows]
    changed, weights, mixture = pre(
        spec, [updates[i] for i in rows], weights, clients[rows], start, w,
        [tags[i] for i in rows], mixture, [used[i] for i in rows],
    )  # fmt: skip
    step = reduce(
        spec["aggregator"], [u + (o - w) for u, o in zip(changed, start, strict=True)], weights
    )
    server |= {"aggregate": step, "share": weights / np.sum(weights)}
    step = server_step(spec, step, changed, server, t)
    chosen = np.array([tags[i] for i in rows])
    if spec["broadcast"] == "ifca":
        moved = []
        for number, m in enumerate(theta):
            mine = np.flatnonzero(chosen == number)
            if len(mine):
                own = [changed[i] + (start[i] - m) for i in mine]
                m = m + reduce(spec["aggregator"], own, weights[mine])
            moved.append(m)
        theta = moved
    return w + step, theta, mixture


def base_is_left(spec: dict[str, Any]) -> bool:
    """Whether the server measures from what each slot left it with."""
    unknown = spec["flight"] == "staggered" and spec["refresh"] != "drift" and spec["sending"]
    return spec["broadcast"] in ("stale", "ifca") or bool(unknown)


def sent_through(
    spec: dict[str, Any],
    clients: NDArray[np.int32],
    sends: NDArray[np.bool_],
    updates: list[Vector],
    messages: list[dict[str, Vector]],
    residual: dict[int, NDArray[np.float64]],
) -> list[Vector]:
    updates = [u.copy() for u in updates]
    for number, (name, setting) in enumerate(spec["sending"]):
        if name == "alie":
            hostile = [i for i, k in enumerate(clients) if MALICIOUS[k] and sends[i]]
            if hostile:
                theirs = np.array([updates[i][:DIM] for i in hostile])
                forged = theirs.mean(0) - setting * theirs.std(0)
                for i in hostile:
                    updates[i][:DIM] = forged
            continue
        if name in ("ipm", "mimic"):
            hostile = [i for i, k in enumerate(clients) if MALICIOUS[k] and sends[i]]
            honest = [i for i, k in enumerate(clients) if not MALICIOUS[k] and sends[i]]
            if honest:
                theirs = np.array([updates[i][:DIM] for i in honest])
                nearest = min(range(len(honest)), key=lambda j: (clients[honest[j]] - 3) % N)
                forged = -0.6 * theirs.mean(0) if name == "ipm" else theirs[nearest]
                for i in hostile:
                    updates[i][:DIM] = forged
            continue
        for i, k in enumerate(clients):
            travels = residual[number].shape[1]
            p = updates[i][:travels]
            if name == "flip" and MALICIOUS[k] and messages:
                messages[i] = {key: -setting * a for key, a in messages[i].items()}
            if not sends[i]:
                continue
            if name == "flip" and MALICIOUS[k]:
                p = -setting * p
            if name == "clip":
                p = p * min(1, setting / np.linalg.norm(p))
            if name in ("top_k", "ternary"):
                full = p + residual[number][k]
                p = code(name, full)
                residual[number][k] = (full - p) * setting
            updates[i] = np.concatenate([p, updates[i][travels:]])
    return updates


def code(name: str, x: Vector) -> Vector:
    kept = np.argsort(-np.abs(x), kind="stable")[: max(1, round(0.4 * len(x)))]
    out = np.zeros_like(x)
    out[kept] = x[kept] if name == "top_k" else np.sign(x[kept]) * np.abs(x[kept]).mean()
    return out


def weigh(name: str, samples: NDArray[np.int64], seen: NDArray[np.int64]) -> Vector:
    ones = np.ones(len(samples))
    return {"equal": ones, "by_samples": samples * ones, "by_samples_visited": seen * ones}[name]


def pre(
    spec: dict[str, Any],
    updates: list[Vector],
    weights: Vector,
    clients: NDArray[np.int32],
    received: list[Vector],
    w: Vector,
    tags: list[int],
    mixture: Vector,
    used: list[Vector],
) -> tuple[list[Vector], Vector, Vector]:
    """Pre-aggregations; they scale parameters, not statistics."""

    def scaled(factor: Sequence[float]) -> list[Vector]:
        return [
            np.concatenate([f * u[:DIM], u[DIM:]]) for f, u in zip(factor, updates, strict=True)
        ]

    name, rho = spec["preaggregation"], spec["momentum"]
    if name == "normalise":
        mu = 0.3 if spec["correction"] == "proximal" else 0.0
        a = [accumulated(rho, k, mu) for k in clients]
        effective = np.sum(weights * a) / np.sum(weights)
        return scaled([effective / x for x in a]), weights, mixture
    if name == "q_fair":
        rate, q = LR / (1 - rho), 0.5
        f = np.array([loss(m, k) for m, k in zip(used, clients, strict=True)])
        square = np.array([np.sum((u[:DIM] / rate) ** 2) for u in updates])
        below = np.sum(weights * (q * f ** (q - 1) * square + f**q / rate))
        # So that the weighted mean of the scaled updates is the paper's step.
        return scaled(np.sum(weights) * f**q / rate / below), weights, mixture
    if name == "agnostic":
        f = np.array([loss(m, k) for m, k in zip(used, clients, strict=True)])
        own = mixture[clients]
        moved = mixture.copy()
        moved[clients] += 0.2 * f
        rows = [u if a > 0 else 0 * u for u, a in zip(updates, own, strict=True)]
        return rows, own if (own > 0).any() else weights, simplex(moved)
    if name == "staleness":
        s = [0.6 * (d + 1) ** -0.5 for d in tags]
        return (
            [a * (u + m - w) - (m - w) for a, u, m in zip(s, updates, received, strict=True)],
            weights,
            mixture,
        )
    if name == "nearest":
        mixed = []
        for u in updates:
            far = [float(np.sum((u - other)[:DIM] ** 2)) for other in updates]
            near = np.argsort(far, kind="stable")[: len(updates) - math.floor(len(updates) / 4)]
            mixed.append(np.mean([updates[i] for i in near], axis=0))
        return mixed, weights, mixture
    if name == "dp":
        norms = [float(np.linalg.norm(u[:DIM])) for u in updates]
        share = len(updates) / 4
        return scaled([share * min(1, 0.5 / n) for n in norms]), np.ones(len(updates)), mixture
    return updates, weights, mixture


def accumulated(rho: float, k: int, mu: float = 0.0) -> float:
    """What the gradients of a visit have come to count together."""
    v = p = 0.0
    for _ in range(EPOCHS * math.ceil(SIZES[k] / BATCH)):
        v = rho * v + 1 - mu * LR * p
        p += v
    return p


def simplex(v: Vector) -> Vector:
    """Projection by bisection of the shift."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        mid = (low + high) / 2
        low, high = (mid, high) if np.maximum(v - mid, 0).sum() > 1 else (low, mid)
    return np.asarray(np.maximum(v - high, 0))


def reduce(name: str, rows: list[Vector], weights: Vector) -> Vector:
    a, kept = np.array(rows), weights > 0
    if name == "mean":
        return np.asarray((weights / weights.sum()) @ a)
    a = a[kept]
    if name == "median":
        return np.asarray(np.median(a, axis=0))
    if name == "trimmed":
        cut = math.floor(0.25 * len(a) + 1e-9)
        return np.asarray(np.sort(a, axis=0)[cut : len(a) - cut].mean(axis=0))
    raise ValueError(name)


def server_step(
    spec: dict[str, Any], step: Vector, updates: list[Vector], state: dict[str, Vector], t: int
) -> Vector:
    """The server's step in what it moves in this round, 0 elsewhere."""
    low, high, statistics = taken_by_server(spec, t)
    name, at = spec["server"], slice(low, high)
    p, s = step[at], statistics * step[DIM:]
    if name == "mix":
        p, s = 0.7 * p, 0.7 * s
    if name in ("momentum", "signs"):
        state["v"][at] = 0.5 * state["v"][at] + p
        p = 0.5 * state["v"][at]
    if name == "signs":
        agreed = np.abs(np.sum([np.sign(u[at]) for u in updates], axis=0)) >= 2
        p = np.where(agreed, p, 0)
    if name == "code":
        full = p + state["r"][at]
        p = code("ternary", full)
        state["r"][at] = full - p
    return np.concatenate([np.zeros(low), p, np.zeros(DIM - high), s])


def ring_weights(slots: int) -> NDArray[np.float64]:
    """Metropolis weights of a ring of more than two."""
    w = np.zeros((slots, slots))
    for i in range(slots):
        w[i, (i + 1) % slots] = w[i, i - 1] = w[i, i] = 1 / 3
    return w
