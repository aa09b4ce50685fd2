"""The ε of compositions: against dp-accounting, or unknown because of a part that is named."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_federation

import fedjax_sim as fs
from fedjax_sim import (
    attacks,
    clock,
    compression,
    corrections,
    diagnostics,
    exchange,
    flight,
    personal,
    privacy,
    selection,
    sending,
    server,
    tree,
    weighting,
)
from fedjax_sim.algorithms import dp_ftrl
from fedjax_sim.base import ClientData, LocalInfo, Server, Slots, Variables
from fedjax_sim.round import collecting
from fedjax_sim.round.start import initial_state

dp: Any = pytest.importorskip("dp_accounting")
pld: Any = pytest.importorskip("dp_accounting.pld")
rdp: Any = pytest.importorskip("dp_accounting.rdp")

N, M, Z, ROUNDS, DELTA = 12, 3, 2.0, 6, 1e-3
KEY = jax.random.key(0)
ONE = fs.make_execution(devices=1)
DATA = make_federation((2,) * N).data
MODEL = fs.models.logistic((6,), 3)
RISK = fs.empirical_risk(MODEL)
LOCAL = fs.local_sgd(RISK, optax.sgd(0.1))
HEAD = fs.leaves.named("Dense_0")
BY_ONE = clock.bandwidth(up=1e6, down=1e6, shared=True)


def gaussian(**parts: Any) -> fs.Algorithm:
    """Cohorts in epochs under the Gaussian mechanism, with other parts."""
    mechanism = privacy.gaussian_mechanism(1.0, Z, M)
    plain: dict[str, Any] = {
        "local": LOCAL,
        "selection": selection.shuffled(),
        "clients_per_round": M,
        "preaggregation": (mechanism,),
    }
    return fs.compose(**(plain | parts)).on(ONE)


def poisson(slots: int) -> fs.Algorithm:
    return gaussian(selection=privacy.poisson(M), clients_per_round=slots)


def clocked(**rule: Any) -> fs.Algorithm:
    return gaussian(clock=clock.simulated(1.0, **rule))


def sends(*parts: Any) -> fs.Algorithm:
    return gaussian(sending=parts)


def normal(mu: float) -> float:
    """A Gaussian mechanism of sensitivity μ."""
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return float(accountant.compose(dp.GaussianDpEvent(1 / mu)).get_epsilon(DELTA))


def fixed(drawn: int) -> float:
    """A client replaced moves the sum by twice the clip."""
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(N, drawn, dp.GaussianDpEvent(Z / 2))
    return float(accountant.compose(event, ROUNDS).get_epsilon(DELTA))


def coins(slots: int) -> float:
    accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = dp.TruncatedSubsampledGaussianDpEvent(
        dataset_size=N, sampling_probability=M / N, truncated_batch_size=slots, noise_multiplier=Z
    )
    return float(accountant.compose(event, ROUNDS).get_epsilon(DELTA))


TWICE = math.sqrt(2) / Z  # of two epochs of four rounds, the second of two
TREE = math.sqrt(3 + 2) / Z  # of four leaves a client is in three nodes, of two in two
BANDS = math.sqrt(1 + 1 / 4 + 9 / 64 + 1 + 1 / 4) / Z  # c = 1, 1/2, 3/8; the second ends early
MALICIOUS = np.arange(N) < 2
# What is composed, and its ε by dp-accounting. Six rounds, twelve clients, three a round.
KNOWN: dict[str, tuple[Callable[[], fs.Algorithm], Callable[[], float]]] = {
    "everyone": (
        lambda: gaussian(selection=selection.everyone(), clients_per_round=N),
        lambda: normal(math.sqrt(ROUNDS) / Z),
    ),
    "shuffled": (gaussian, lambda: normal(TWICE)),
    "cyclic": (lambda: gaussian(selection=selection.cyclic()), lambda: normal(TWICE)),
    "uniform": (lambda: gaussian(selection=selection.uniform()), lambda: fixed(M)),
    "two of three slots": (
        lambda: gaussian(selection=selection.uniform(active=2)), lambda: fixed(2),
    ),
    "an adaptive clip": (
        lambda: gaussian(
            preaggregation=(privacy.adaptive_mechanism(1.0, Z, M, count_noise=1.5),)
        ),
        lambda: normal(TWICE),
    ),
    "trees": (
        lambda: dp_ftrl(LOCAL, clients_per_round=M, noise_multiplier=Z), lambda: normal(TREE),
    ),
    "one band": (
        lambda: dp_ftrl(LOCAL, clients_per_round=M, noise_multiplier=Z, bands=1),
        lambda: normal(TWICE),
    ),
    "bands": (
        lambda: dp_ftrl(LOCAL, clients_per_round=M, noise_multiplier=Z, bands=3),
        lambda: normal(BANDS),
    ),
    # Clients that are lost by their own coins send zero.
    "failures": (lambda: clocked(failures=0.3), lambda: normal(TWICE)),
    # What acts on one client's message before the clip.
    "codes and noise of the clients'": (
        lambda: sends(
            sending.clip_norm(2.0), sending.noise(0.1), sending.compressed(compression.top_k(0.5))
        ),
        lambda: normal(TWICE),
    ),
    "attackers, each alone": (
        lambda: sends(attacks.sign_flip(MALICIOUS)), lambda: normal(TWICE),
    ),
    # What follows the noise.
    "codes of the server's": (
        lambda: gaussian(
            server=server.chain(
                server.optimizer(optax.sgd(0.1, momentum=0.9)),
                server.compress_server(server.mix(0.5), compression.top_k(0.5)),
            )
        ),
        lambda: normal(TWICE),
    ),
    # What stays with a client.
    "own leaves": (lambda: gaussian(exchange=exchange.split(own=HEAD)), lambda: normal(TWICE)),
    "own models": (
        lambda: gaussian(local=personal.ditto(LOCAL, 0.1), personal=personal.stored()),
        lambda: normal(TWICE),
    ),
    "own terms and optimisers": (
        lambda: gaussian(
            local=LOCAL.change(corrections=(corrections.proximal(0.1),), optimizer_state="keep"),
            weighting=weighting.by_samples,
        ),
        lambda: normal(TWICE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_epsilon_is_that_of_dp_accounting(case: str) -> None:
    make, wanted = KNOWN[case]
    algorithm = make()
    assert algorithm.epsilon(DATA, ROUNDS, DELTA) == pytest.approx(wanted(), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [M, privacy.slots_for(M)])
def test_epsilon_of_poisson_cohorts_counts_the_slots(slots: int) -> None:
    spent = poisson(slots).epsilon(DATA, ROUNDS, DELTA)
    assert spent == pytest.approx(coins(min(slots, N)), rel=1e-6)


def changed(**fields: Any) -> ClientData:
    return dataclasses.replace(DATA, **fields)


class unchanged(fs.base.PreAggregation):
    """A pre-aggregation that changes nothing."""

    def apply(self, key: Any, state: Any, updates: Any, weights: Any, cohort: Any) -> Any:
        return updates, weights, state


class own_mechanism(unchanged):
    """A user's mechanism, which needs nothing of other parts."""

    @property
    def epsilon(self) -> Any:
        return lambda **settings: 1.0


class cyclic(fs.base.Selection):
    """A user's selection with the package's name: it draws uniformly and promises nothing."""

    def draw(
        self, key: Any, state: Any, data: Any, clients: Any, free: Any, visits: Any
    ) -> tuple[jax.Array, Any]:
        return jax.random.choice(key, data.clients, (len(free),), replace=False), state


class promised(cyclic):
    """A user's selection that promises how clients take part."""

    participation = "cyclic"


class sees_updates(promised):
    """A user's selection that reads single clients' updates."""

    def see(self, state: Any, client: Any, updates: Any, moved: Any) -> Any:
        return state


class remembers(fs.base.Broadcast):
    """The server model for all; a copy of the first one is kept."""

    def init(self, variables: Any, data: Any) -> Any:
        return variables

    def send(self, key: Any, state: Any, server: Any, client: Any) -> Any:
        return server, ()


class looks(Server):
    """A server that looks for the names of leaves."""

    reads_updates = False
    replaces = True

    def init(self, variables: Any) -> Any:
        return looks_for_names(variables)

    def update(self, key: Any, step: Any, server: Any, state: Any, gathered: Any) -> Any:
        return step, state


def looks_for_names(variables: Any) -> Any:
    return variables.params["Dense_0"]


class named_leaves(fs.base.Wrapper):
    def shared_state(self, variables: Any) -> Any:
        return looks_for_names(variables)


class unchecked(privacy.gaussian_mechanism):
    """The mechanism without its needs."""

    needs = ()


MECHANISM = privacy.gaussian_mechanism(1.0, Z, M)
FEDAVG = fs.fedavg(LOCAL, clients_per_round=M).on(ONE)
LATE = "unknown because of clock simulated(1.0, "
# What is composed or trained on, and the part that is named.
UNKNOWN: dict[str, tuple[Callable[[], fs.Algorithm], str]] = {
    "over-selection": (lambda: clocked(first=2), LATE + "first=2): ε needs clients that are only"),
    "a deadline": (lambda: clocked(deadline=9.0), LATE + "deadline=9.0)"),
    "sleep": (lambda: clocked(available=clock.bernoulli(0.5)), LATE + "available=bernoulli(0.5))"),
    "late models": (
        lambda: gaussian(
            selection=selection.uniform(),
            flight=flight.buffered(M),
            clock=clock.simulated(1.0),
        ),
        "unknown because of flight buffered(3)",
    ),
    "slots that keep their clients": (
        lambda: gaussian(selection=selection.uniform(sticky=True)),
        "unknown because of selection uniform(sticky=True)",
    ),
    "a selection of the user's": (
        lambda: gaussian(selection=cyclic()), "unknown because of selection cyclic()",
    ),
    "a selection that sees updates": (
        lambda: gaussian(selection=sees_updates()), "unknown because of selection sees_updates()",
    ),
    "another part before the mechanism": (
        lambda: gaussian(preaggregation=(unchanged(), MECHANISM)),
        "unknown because of preaggregation (unchanged(), gaussian_mechanism(1.0, 2.0, 3))",
    ),
    "another rule than the mean": (
        lambda: FEDAVG.replace(
            preaggregation=(own_mechanism(),), aggregator=fs.aggregators.coordinate_median
        ),
        "unknown because of aggregator coordinate_median: ε needs the plain mean",
    ),
    "attackers who see others": (
        lambda: FEDAVG.replace(
            preaggregation=(own_mechanism(),), sending=(sending.alie(np.ones(N, bool), z=1.0),)
        ),
        "unknown because of sending (alie(",
    ),
    "no mechanism": (lambda: FEDAVG, "unknown because of preaggregation (): ε needs a private"),
    "statistics of rows": (
        lambda: gaussian(diagnostics={"far": diagnostics.model_divergence()}),
        "unknown because of diagnostics {'far': model_divergence()}",
    ),
    "a broadcast that remembers": (
        lambda: gaussian(broadcast=remembers()), "unknown because of broadcast remembers()",
    ),
    "a local update that cannot be seen through": (
        lambda: gaussian(
            local=named_leaves(LOCAL), preaggregation=(unchecked(1.0, Z, M),)
        ),
        "unknown because of local named_leaves(local_sgd(",
    ),
    "a server that cannot be seen through": (
        lambda: gaussian(server=looks()), "unknown because of server looks()",
    ),
    "a server that trains": (
        lambda: gaussian(server=server.train_on_root(LOCAL)),
        "unknown because of server train_on_root(",
    ),
    "weights of the user's": (
        lambda: gaussian(weighting=lambda samples, visited: samples / samples.max()),
        "unknown because of weighting <lambda>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_epsilon_is_unknown_because_of_a_part(case: str) -> None:
    make, message = UNKNOWN[case]
    with pytest.raises(privacy.UnknownEpsilonError, match="^" + re.escape(message)) as caught:
        make().epsilon(DATA, ROUNDS, DELTA)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(sent=np.int32(4)), "samples that all clients are sent (--share-beta)"),
        (
            changed(root=np.array([0, 2], np.int32)),
            "the server's own samples, which no noise covers",
        ),
        (changed(copies=True), "copies of samples, whose number may depend on other clients"),
    ],
)
def test_epsilon_is_unknown_because_of_the_data(data: ClientData, message: str) -> None:
    with pytest.raises(
        privacy.UnknownEpsilonError, match=re.escape(f"unknown because of {message}")
    ):
        gaussian().epsilon(data, ROUNDS, DELTA)


def test_bands_need_a_promise_and_no_name() -> None:
    bands = privacy.banded_mechanism(1.0, Z, M, 3)
    with pytest.raises(ValueError, match=r"needs clients that wait .* selection is cyclic\("):
        gaussian(selection=cyclic(), preaggregation=(bands,))
    spent = gaussian(selection=promised(), preaggregation=(bands,)).epsilon(DATA, ROUNDS, DELTA)
    assert spent == pytest.approx(normal(BANDS), rel=1e-3)


class by_loss(Server):
    """Moves by the loss that one client reports."""

    reads_updates = False

    def update(self, key: Any, step: Any, server: Any, state: Any, gathered: Any) -> Any:
        return jax.tree.map(lambda a: a * gathered.cohort.info.loss[0], step), state


SERVERS: dict[str, Callable[[], Server]] = {
    "replace": server.replace,
    "mix": lambda: server.mix(0.5),
    "optimizer": lambda: server.optimizer(optax.sgd(0.1, momentum=0.9)),
    "chain": lambda: server.chain(server.mix(0.5), server.optimizer(optax.sgd(0.1))),
    "compress_server": lambda: server.compress_server(server.replace(), compression.top_k(0.5)),
    "train_on_root": lambda: server.train_on_root(LOCAL),
    "extrapolated": server.extrapolated,
    "sign_agreement": lambda: server.sign_agreement(2, server.replace()),
    "distilled": lambda: server.distilled(MODEL, steps=2, batch_size=2),
    "dynamic": lambda: server.dynamic(0.1),
    "participation": server.participation,
    "exact_lora": server.exact_lora,
    "train_beside": lambda: server.train_beside(LOCAL),
    "a chain of one that reads": lambda: server.chain(server.replace(), server.extrapolated()),
    "a user's": by_loss,
}
BLIND = ("replace", "mix", "optimizer", "chain", "compress_server", "train_on_root")
WIDE, NARROW = (8.0, -8.0, 0.0, 1.0) * 3, (2.0, -2.0, 1.0, 0.0) * 3
"""What the clients of two federations send, in multiples of one direction: of one sum."""


def after_a_round(lengths: Sequence[float], move: Server) -> Variables:
    """The server model under the mechanism, of which the need that is tested is left out."""
    mechanism = unchecked(1.0, 1e-4, M)
    parts = (
        gaussian(clients_per_round=N, selection=selection.everyone())
        .replace(preaggregation=(mechanism,), server=move)
        .parts
    )
    data = jax.tree.map(jnp.asarray, changed(root=np.array([0, 4], np.int32)))
    state = initial_state(parts, MODEL.init(KEY), data)
    rows, ids = jnp.float32(lengths), jnp.arange(N, dtype=jnp.int32)
    along = jax.tree.map(lambda w: 1e-2 * (w + 1)[None], state.server)
    updates = jax.tree.map(lambda a: tree.expand(rows, a) * a, along)
    info = LocalInfo(jnp.abs(rows), ids + 1, ids + 1)
    slots = Slots(updates, ids, ids * 0 + 1, ids + 1, info, (), ())
    cohort = collecting.cohort_of(parts, state, slots, ids + 1, data)
    return collecting.absorb(parts, KEY, state, slots, cohort, ids >= 0, updates).server


def test_every_server_is_tried() -> None:
    assert {*server.__all__} <= SERVERS.keys()


@pytest.mark.parametrize("name", SERVERS)
def test_two_cohorts_with_one_noisy_sum_end_at_one_model(name: str) -> None:
    """Or the server is rejected."""
    move = SERVERS[name]()
    if name not in BLIND:
        with pytest.raises(ValueError, match="needs a server that sees nothing but the noisy mean"):
            gaussian(server=move)
        if name not in ("extrapolated", "a chain of one that reads", "a user's"):
            return
    else:
        gaussian(server=move)
    one, other = (after_a_round(lengths, move) for lengths in (WIDE, NARROW))
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    far = max(float(jnp.abs(a - b).max()) for a, b in pairs)
    assert (far < 1e-6) == (name in BLIND), far
