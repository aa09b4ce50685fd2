"""What clients send, whenever a model is sent: attacks, codes, clips and noise against plain loops.

Clients are quadratic bowls, F_k(w) = ½ mean ‖x_i - w‖², trained by full batches, so that a step
goes LR of the way to the client's mean. The loops are told of the package's run who trained which
model, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import altered_data, assert_trees, rejects
from scipy import stats

import fedjax_sim as fs
from fedjax_sim import attacks, compression, sending, tree
from fedjax_sim.algorithms import gossip, ifca, qffl, scaffold
from fedjax_sim.base import Sending, Sent, Variables
from fedjax_sim.client import corrections

N, WIDTH, LR, SCALE = 6, 4, 0.5, 3.0
SIZES = np.array([1, 3, 2, 4, 1, 2])
MALICIOUS = np.isin(np.arange(N), [1, 2, 4])
COLLUDING = np.isin(np.arange(N), [3, 4, 5])
ONE = fs.make_execution(devices=1)
START = np.array([4.0, -1.0, 0.5, 2.0], np.float32)

Row = np.ndarray
Stack = list[np.ndarray]
SendAll = Callable[[Sequence[int], Stack], Stack]


def clients_data(width: int = WIDTH) -> fs.ClientData:
    rng = np.random.default_rng(4)
    owner = np.repeat(np.arange(N), SIZES)
    x = 2 * rng.normal(size=(N, width))[owner] + rng.normal(size=(len(owner), width))
    start = np.cumsum([0, *SIZES]).astype(np.int32)
    lists = fs.partition.Partition(np.arange(len(owner), dtype=np.int32), start)
    return fs.client_data(x.astype(np.float32), rng.integers(0, 2, len(owner)), lists)


DATA = clients_data()
SAMPLES = np.split(np.asarray(DATA.x, np.float64), np.asarray(DATA.start[1:-1]))
MEANS = [x.mean(axis=0) for x in SAMPLES]


def bowl(params: Any, state: Any, batch: Any, context: Any) -> tuple[jax.Array, Any]:
    square = jnp.sum((batch.x - params["w"][None]) ** 2, axis=-1)
    return 0.5 * jnp.mean(square, where=batch.mask), state


def two_bowls(params: Any, state: Any, batch: Any, context: Any) -> Any:
    """A sample of class y pulls at row y."""
    square = jnp.sum((batch.x - params["w"][batch.y]) ** 2, axis=-1)
    return 0.5 * jnp.mean(square, where=batch.mask), state


def loss(k: int, w: Row) -> float:
    return float(0.5 * ((SAMPLES[k] - w) ** 2).sum(axis=1).mean())


def local_sgd(lr: float = LR, objective: Any = bowl, **options: Any) -> fs.LocalUpdate:
    return fs.local_sgd(objective, optax.sgd(lr), batch_size=8, **options)


class Run(NamedTuple):
    """A run's states and metrics, each stacked over the rounds, and its last collection."""

    first: Any
    states: Any
    metrics: Any
    final: Any
    final_uploads: int

    @property
    def servers(self) -> np.ndarray:
        return np.asarray(self.states.server.params["w"])


def program(algorithm: fs.Algorithm, rounds: int, start: np.ndarray = START) -> Any:
    """A whole run as one compiled function of the clients' data."""

    @jax.jit
    def whole(data: fs.ClientData) -> Any:
        key = jax.random.key(3)
        first = algorithm.init(key, Variables({"w": jnp.asarray(start)}, {}), data)

        def step(state: Any, t: jax.Array) -> Any:
            state, metrics = algorithm.step(jax.random.fold_in(key, t), state, data)
            return state, (state, metrics)

        last, (states, metrics) = jax.lax.scan(step, first, jnp.arange(rounds))
        final, uploads = algorithm.collect(jax.random.fold_in(key, rounds), last, data)
        return first, states, metrics, final.params["w"], uploads

    return lambda data: Run(*jax.device_get(whole(jax.tree.map(jnp.asarray, data))))


def run(algorithm: fs.Algorithm, rounds: int, start: np.ndarray = START) -> Run:
    return program(algorithm, rounds, start)(DATA)


def fedavg(*parts: Sending, local: fs.LocalUpdate | None = None) -> fs.Algorithm:
    plain = fs.fedavg(local or local_sgd(), clients_per_round=4, equal_weights=True).on(ONE)
    return plain.replace(sending=parts)


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=2e-5, atol=2e-5)


# What each part makes of the updates of the clients that send in a round, in NumPy.


def flipped(clients: Sequence[int], updates: Stack) -> Stack:
    return [-SCALE * u if MALICIOUS[k] else u for k, u in zip(clients, updates, strict=True)]


def colluding(z: float | None, malicious: np.ndarray = MALICIOUS) -> SendAll:
    """Baruch et al., Algorithm 3."""

    def send(clients: Sequence[int], updates: Stack) -> Stack:
        known = [u for k, u in zip(clients, updates, strict=True) if malicious[k]]
        if not known:
            return updates
        n, m = len(updates), len(known)
        needed = n // 2 + 1 - m
        share = (n - m - needed) / (n - m) if n > m else 1.0
        shift = stats.norm.ppf(np.clip(share, 0.5, 0.999)) if z is None else z
        forged = np.mean(known, axis=0) - shift * np.std(known, axis=0)
        return [forged if malicious[k] else u for k, u in zip(clients, updates, strict=True)]

    return send


def shrunk(u: Row, limit: float) -> Row:
    return u * min(1.0, limit / float(np.linalg.norm(u)))


def clipped(limit: float) -> SendAll:
    return lambda clients, updates: [shrunk(u, limit) for u in updates]


def in_turn(*sends: SendAll) -> SendAll:
    def send(clients: Sequence[int], updates: Stack) -> Stack:
        for one in sends:
            updates = one(clients, updates)
        return updates

    return send


def largest_two(u: Row) -> Row:
    chosen = np.argsort(-np.abs(u), kind="stable")[:2]
    return np.where(np.isin(np.arange(len(u)), chosen), u, 0)


FLIP = attacks.sign_flip(MALICIOUS, SCALE)
TOP_TWO = compression.compressed(compression.top_k(2 / WIDTH))

LIMIT = 3.0  # above some updates and below others, of either kind

# Parts, the same in NumPy, and how many of RADFed's four models train in a round.
HOPS: dict[str, tuple[tuple[Sending, ...], SendAll, int]] = {
    "flipped, then clipped": (
        (FLIP, sending.clip_norm(LIMIT)),
        in_turn(flipped, clipped(LIMIT)),
        4,
    ),
    "in collusion": ((attacks.alie(MALICIOUS),), colluding(None), 3),
}


@pytest.mark.parametrize("case", HOPS)
def test_every_hop_of_radfed(case: str) -> None:
    """Five rounds, aggregated after the third; the last collection takes models as they are."""
    parts, send, active = HOPS[case]
    method = fs.radfed(
        local_sgd(),
        clients_per_round=4,
        redistribution_rounds=3,
        active_clients=active if active < 4 else None,
    ).on(ONE)
    ours = run(method.replace(sending=parts), 5)
    server: Row = START.astype(float)
    slots, forged = [server] * 4, 0
    norms = []
    for t, (clients, source) in enumerate(
        zip(ours.metrics.client.tolist(), ours.metrics.source.tolist(), strict=True)
    ):
        slots = [server] * 4 if t % 3 == 0 else [slots[j] for j in source]
        busy = [i for i in range(4) if clients[i] < N]
        visited = [clients[i] for i in busy]
        honest = [LR * (MEANS[clients[i]] - slots[i]) for i in busy]
        norms += [np.linalg.norm(u) for u in flipped(visited, honest)]
        for i, update in zip(busy, send(visited, honest), strict=True):
            slots[i] = slots[i] + update
        forged += sum(MALICIOUS[k] for k in visited) if t % 3 < 2 else 0
        if t % 3 == 2:
            server = np.mean(slots, axis=0)
        close(ours.states.slots.variables.params["w"][t], slots)
        close(ours.servers[t], server)
        assert ours.metrics.uploads[t] == len(busy) == active
    close(ours.final, np.mean(slots, axis=0))
    assert min(norms) < LIMIT < max(norms)
    assert forged > 1  # between the clients, where the server sees nothing


def test_every_neighbour_of_gossip() -> None:
    """Those in collusion know what is sent, which one of them has turned around before."""
    method = gossip(local_sgd(), clients_per_round=4).on(ONE)
    ours = run(method.replace(sending=(FLIP, attacks.alie(COLLUDING, 1.5))), 3)
    nodes = ours.metrics.client[0].tolist()
    assert sum(COLLUDING[nodes]) == 2, nodes
    assert sum(MALICIOUS[nodes] & COLLUDING[nodes]) == 1
    assert 2 <= sum(MALICIOUS[nodes] | COLLUDING[nodes]) < 4
    send = in_turn(flipped, colluding(1.5, COLLUDING))
    ring = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]) / 3
    slots = [START.astype(float)] * 4
    for t in range(3):
        slots = list(ring @ np.array(slots)) if t else slots
        updates = [LR * (MEANS[k] - w) for k, w in zip(nodes, slots, strict=True)]
        slots = [w + u for w, u in zip(slots, send(nodes, updates), strict=True)]
        close(ours.states.slots.variables.params["w"][t], slots)
    close(ours.final, np.mean(slots, axis=0))


def test_phase_shift_sends_one_message_when_due() -> None:
    """Attack, then code with feedback, then clip: at an upload, and when the rest is collected."""
    limit = 2.0
    method = fs.phase_shift(local_sgd(), clients_per_round=4, phases=2).on(ONE)
    method = method.replace(sending=(FLIP, TOP_TWO, sending.clip_norm(limit)))
    ours = run(method, 5)
    server, residual, behind = START.astype(float), np.zeros((N, WIDTH)), 0
    slots = [server] * 4

    def sent(k: int, update: Row) -> Row:
        full = flipped([k], [update])[0] + residual[k]
        code = largest_two(full)
        residual[k] = full - code
        return shrunk(code, limit)

    def collected(rows: list[int], clients: list[int]) -> Row:
        return np.average(
            [slots[i] for i in rows], axis=0, weights=SIZES[[clients[i] for i in rows]]
        )

    hostile = 0
    for t, clients in enumerate(ours.metrics.client.tolist()):
        due = [2 * (t % 2), 2 * (t % 2) + 1]
        for i, k in enumerate(clients):
            fresh = t == 0 or i // 2 == (t - 1) % 2
            pull = 1.0 if fresh else behind / (SIZES[k] + behind)
            received = pull * server + (1 - pull) * slots[i]
            slots[i] = received + LR * (MEANS[k] - received)
        for i in due:  # a change from w_t, which the client was sent in this round
            slots[i] = server + sent(clients[i], slots[i] - server)
        close(ours.states.slots.variables.params["w"][t], slots)
        close(ours.states.sending[1][t], residual)
        hostile += sum(MALICIOUS[clients[i]] for i in due)
        server, behind = collected(due, clients), sum(SIZES[clients[i]] for i in due)
        close(ours.servers[t], server)
    for i in {0, 1, 2, 3} - set(due):
        slots[i] = server + sent(clients[i], slots[i] - server)
    close(ours.final, collected([0, 1, 2, 3], clients))
    assert 0 < hostile < 10
    assert ours.metrics.uploads.tolist() == [2] * 5
    assert ours.final_uploads == 2
    # 2 of 4 positions in 2 bits each, and 2 values of 32 bits: 68 bits, 9 bytes. A model has 16.
    traffic = method.traffic(Variables({"w": START}, {}), DATA)
    assert (traffic.upload, traffic.download) == (9, 16)


def test_a_code_between_clients_is_no_saving() -> None:
    """Neighbours do not know what a client received: they are sent the model whole."""
    variables = Variables({"w": START}, {})
    local = local_sgd()
    ours = [
        method.replace(sending=(TOP_TWO,)).traffic(variables, DATA).upload
        for method in (
            fs.fedavg(local, clients_per_round=4),
            fs.radfed(local, clients_per_round=4),
            gossip(local, clients_per_round=4),
        )
    ]
    assert ours == [9, 9, 16]


def test_scaffold_forges_the_variate_too() -> None:
    local = local_sgd(epochs=2)
    ours = run(scaffold(local, clients_per_round=4).on(ONE).replace(sending=(FLIP,)), 3)
    w, c, own = START.astype(float), np.zeros(WIDTH), np.zeros((N, WIDTH))
    for t, clients in enumerate(ours.metrics.client.tolist()):
        updates, changes = [], []
        for k in clients:
            v, path = w, []
            for _ in range(2):
                path.append(v - MEANS[k])
                v = v - LR * (path[-1] - own[k] + c)
            updates.append(v - w)
            changes.append(np.mean(path, axis=0) - own[k])
            own[k] = np.mean(path, axis=0)
        w = w + np.mean(flipped(clients, updates), axis=0)
        c = c + np.sum(flipped(clients, changes), axis=0) / N
        close(ours.servers[t], w)
        close(ours.states.shared_state[1][0]["w"][t], c)
        close(ours.states.client_state[1][0]["w"][t], own)  # an attacker's own is as it should be


def test_qffl_measures_what_is_sent() -> None:
    """The forged updates are in the step and in the bound of its curvature."""
    q = 2
    method = qffl(local_sgd(), clients_per_round=4, objective=bowl, lr=LR, q=float(q)).on(ONE)
    ours = run(method.replace(sending=(FLIP,)), 3)
    w = START.astype(float)
    for t, clients in enumerate(ours.metrics.client.tolist()):
        updates = flipped(clients, [LR * (MEANS[k] - w) for k in clients])
        step, bound = np.zeros(WIDTH), 0.0
        for k, u in zip(clients, updates, strict=True):
            f, slope = loss(k, w), -u / LR
            step += f**q * slope
            bound += q * f ** (q - 1) * float(slope @ slope) + f**q / LR
        w = w - step / bound
        close(ours.servers[t], w)


def test_ifca_forges_the_cluster() -> None:
    method = ifca(local_sgd(), clients_per_round=5, objective=bowl, clusters=2).on(ONE)
    ours = run(method.replace(sending=(FLIP,)), 3)
    theta = np.asarray(ours.first.broadcast.variables.params["w"], np.float64)
    taken: set[int] = set()
    for t, clients in enumerate(ours.metrics.client.tolist()):
        chosen = [int(np.argmin([loss(k, w) for w in theta])) for k in clients]
        updates = [LR * (MEANS[k] - theta[j]) for k, j in zip(clients, chosen, strict=True)]
        sent = flipped(clients, updates)
        for j in set(chosen):
            of = [i for i in range(5) if chosen[i] == j]
            weights = SIZES[[clients[i] for i in of]]
            theta[j] += np.average([sent[i] for i in of], axis=0, weights=weights)
        taken |= set(chosen)
        close(ours.states.broadcast.variables.params["w"][t], theta)
    assert taken == {0, 1}


class quiet(Sending):
    """A user's part that withholds small updates."""

    bound: float

    withholds = True

    def send(self, key: Any, kept: Any, update: Variables, message: Any, client: Any) -> Sent:
        return Sent(update, message, kept, tree.norm(update.params) >= self.bound)


def test_what_is_withheld_was_not_sent() -> None:
    """Not in the mean, not among the uploads, and no code of it was taken from a residual."""
    bound = 1.7
    ours = run(fedavg(quiet(bound), TOP_TWO), 5)
    w, residual = START.astype(float), np.zeros((N, WIDTH))
    counts = []
    for t, clients in enumerate(ours.metrics.client.tolist()):
        arrived = []
        for k in clients:
            update = LR * (MEANS[k] - w)
            if np.linalg.norm(update) >= bound:
                arrived.append(largest_two(update + residual[k]))
                residual[k] += update - arrived[-1]
        w = w + np.mean(arrived, axis=0)
        counts.append(len(arrived))
        close(ours.servers[t], w)
        close(ours.states.sending[1][t], residual)
        assert ours.states.server_samples[t] <= SIZES[clients].sum()
    assert ours.metrics.uploads.tolist() == counts
    assert 0 < min(counts) < max(counts)
    assert ours.metrics.visits.tolist() == [4] * 5  # all have trained


def test_a_model_in_flight_cannot_be_withheld() -> None:
    for method in (fs.phase_shift, fs.radfed, gossip):
        with pytest.raises(ValueError, match="needs models that return in the round in which they"):
            method(local_sgd(), clients_per_round=4).replace(sending=(quiet(1.0),))


def test_messages_are_forged_where_they_are_floats() -> None:
    """Averaged momenta and the losses that μ follows; counts would give the attacker away."""
    local = fs.local_sgd(
        bowl,
        optax.sgd(lambda count: LR, momentum=0.5),  # which counts its steps in an integer
        batch_size=8,
        epochs=2,
        optimizer_state="average",
        corrections=(corrections.adaptive_proximal(0.2),),
    )
    ours = run(fedavg(FLIP, local=local), 3)
    w, v, mu, last = START.astype(float), np.zeros(WIDTH), 0.2, np.nan
    (trace, scale), (at,), _ = ours.states.shared_state
    for t, clients in enumerate(ours.metrics.client.tolist()):
        updates, momenta, losses = [], [], []
        for k in clients:
            model, velocity, seen = w, v, []
            for _ in range(2):
                seen.append(loss(k, model))
                velocity = 0.5 * velocity + (model - MEANS[k]) + mu * (model - w)
                model = model - LR * velocity
            updates.append(model - w)
            momenta.append(velocity)
            losses.append(np.array(np.mean(seen)))
        w = w + np.mean(flipped(clients, updates), axis=0)
        v = np.mean(flipped(clients, momenta), axis=0)
        told = float(np.average(flipped(clients, losses), weights=SIZES[clients]))
        mu, last = mu + 0.1 * (told > last), told
        close(ours.servers[t], w)
        close(trace.trace["w"][t], v)
        close([at.loss[t], at.mu[t]], [told, mu])
        assert scale.count[t] == 2 * (t + 1)


POISONED: dict[str, Callable[[fs.LocalUpdate], fs.Algorithm]] = {
    "qffl": lambda local: qffl(local, clients_per_round=5, objective=two_bowls, lr=LR, q=2.0).on(
        ONE
    ),
    "ifca": lambda local: ifca(local, clients_per_round=5, objective=two_bowls, clusters=2).on(ONE),
}


@pytest.mark.parametrize("name", POISONED)
def test_flipped_labels_poison_all_that_a_client_computes(name: str) -> None:
    """Losses, the weights made of them and the choice of a cluster: as if y itself were flipped."""
    start = np.stack([START, START[::-1]])
    whole = program(POISONED[name](local_sgd(objective=two_bowls)), 3, start)
    owner = np.repeat(np.arange(N), SIZES)
    plain = altered_data(DATA, relabel=np.tile(np.arange(2, dtype=np.int32), (N, 1)))
    wrong = altered_data(plain, y=np.where(MALICIOUS[owner], 1 - DATA.y, DATA.y).astype(np.int32))
    honest, literal, ours = map(whole, (plain, wrong, attacks.label_flip(DATA, MALICIOUS, 2)))

    def decided(of: Run) -> Any:
        choices = of.metrics.diagnostics
        return of.servers, of.states.preaggregation, of.states.broadcast, choices, of.metrics.loss

    assert_trees(decided(ours), decided(literal), rtol=1e-5, atol=1e-6)
    key = {"qffl": "server", "ifca": "broadcast"}[name]
    a, b = (jax.tree.leaves(getattr(of.states, key))[0] for of in (ours, honest))
    assert np.abs(a - b).max() > 1e-3


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "z": (lambda: attacks.alie(MALICIOUS, np.nan), "z must be finite, got nan"),
    "labels": (
        lambda: attacks.label_flip(DATA, MALICIOUS[:5], 2),
        "malicious must be bool[6], one for each client, got shape [5]",
    ),
    "labels twice": (
        lambda: attacks.label_flip(attacks.label_flip(DATA, MALICIOUS, 2), MALICIOUS, 2),
        "data must have its original labels, got labels that were changed before",
    ),
}


test_refused = rejects(REFUSED)
