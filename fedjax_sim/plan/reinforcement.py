"""FAVOR: a Q-network that reads all models selects the clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Count,
    Natural,
    PerClient,
    Positive,
    PyTree,
    Selection,
    SetupTraffic,
    Share,
    Variables,
    concrete,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import client_sizes
from fedjax_sim.engine.draws import distinct, signs
from fedjax_sim.engine.memory import check_memory_for
from fedjax_sim.engine.needs import OWN_SAMPLES


class Network(NamedTuple):
    """Q, with one hidden layer: ``max(s A + a, 0) B + b``.

    Attributes:
        a: ``f32[(N + 1) d, H]``.
        a_bias: ``f32[H]``.
        b: ``f32[H, N]``.
        b_bias: ``f32[N]``.
    """

    a: Array
    a_bias: Array
    b: Array
    b_bias: Array


class Agent(NamedTuple):
    """The state of the selection; C rounds are replayed.

    Attributes:
        network: θ.
        target: θ', an older θ.
        optimizer: the optimiser's state.
        models: ``f32[N, d]``, sketches of the clients' last models.
        server: ``f32[d]``, the sketch of the server model.
        scale: ``f32[]``, the divisor of both.
        client: ``int32[K]``, the clients that have answered; N for none.
        answer: ``f32[K]``, their accuracies.
        accuracy: ``f32[]``, the mean of the last answers, weighted by samples.
        round: ``int32[]``, the number of rounds begun.
        states: ``f32[C, (N + 1) d]``, s by round modulo C.
        chosen: ``bool[C, N]``, the cohorts.
        rewards: ``f32[C]``.
    """

    network: Network
    target: Network
    optimizer: PyTree
    models: Array
    server: Array
    scale: Array
    client: Array
    answer: Array
    accuracy: Array
    round: Array
    states: Array
    chosen: Array
    rewards: Array


class deep_q(Selection):
    r"""FAVOR: the clients with the largest values of a double deep Q-network.

    .. math:: U_t = \text{the } m \text{ largest of } Q(s_t, \cdot; \theta), \qquad
              s_t = (z^1, \dots, z^N, z), \qquad r_t = \Xi^{A_{t+1} - \Omega} - 1, \\
              \min_\theta \bigl(r_t + \gamma\, Q(s_{t+1}, \arg\max_a Q(s_{t+1}, a; \theta); \theta')
              - Q(s_t, k; \theta)\bigr)^2, \qquad k \in U_t

    with d-dimensional sketches z of the server model and of each client's last model, and
    :math:`A_t`, the accuracy of the server model in round t. With probability
    :math:`\epsilon\,\delta^t` a slot visits a uniformly drawn client instead. In every round the
    agent takes some steps of RMSprop on B rounds drawn from the last C.

    The authors train the agent in many earlier federated runs. Here it learns within the run, or
    starts from the ``network`` of another run (``state.selection.network``). They select one client
    per round during training; here each of the m clients is an action with the common reward. They
    compress models by principal components; here it is a fixed random projection (each weight, with
    a random sign, is added to one of d sums) of the difference from the first server model, divided
    by its root mean square over the clients' first models. They measure the accuracy on the
    server's samples; here clients report it on their own.

    Args:
        score: ``(variables, client) -> f32[]``, A of one client
            (:func:`fedjax_sim.reports.accuracy`); the mean is weighted by samples.
        first: ``(variables, client) -> variables``, the model that a client trains before the first
            round.
        target: Ω.
        base: Ξ.
        discount: γ.
        explore: ε.
        decay: δ.
        lr: the agent's learning rate.
        steps: the agent's steps in a round; 0 to stop learning.
        batch: B.
        replay: C; memory: 4 C (N + 1) d bytes.
        copied: the number of rounds after which θ' becomes θ.
        size: d.
        hidden: H, the number of units of Q's hidden layer.
        evaluated: the number of clients that are polled in each round, drawn uniformly; None: all.
        network: the initial θ; None: random, the same in all runs.

    Raises:
        ValueError: when the state is initialised, if the network has other numbers of inputs and
            outputs, or the replay memory is larger than this machine's.

    Source: Wang et al. 2020 <https://doi.org/10.1109/INFOCOM41043.2020.9155494>, sections III and
    IV.
    """

    score: Callable[[Variables, ClientView], Array]
    first: Callable[[Variables, ClientView], Variables]
    _: dataclasses.KW_ONLY
    target: float = 0.99
    base: float = 64.0
    discount: Share = 0.999
    explore: Share = 0.5
    decay: Share = 0.95
    lr: Positive = 1e-3
    steps: Natural = 1
    batch: Count = 32
    replay: int = 200
    copied: Count = 10
    size: Count = 100
    hidden: Count = 512
    evaluated: Count | None = None
    network: Network | None = None

    needs = (OWN_SAMPLES,)

    def __post_init__(self) -> None:
        if concrete(self.base) and not self.base > 1:
            raise ValueError(f"base must be more than 1, got {self.base}")
        if self.replay < 2:
            raise ValueError(f"replay must be at least 2, got {self.replay}")

    @property
    def ask(self) -> Callable[[Variables, ClientView], Array]:
        return self.score

    def setup_traffic(self, variables: Variables, data: ClientData) -> SetupTraffic:
        once = data.clients * tree.num_bytes(variables)
        return SetupTraffic(once, once)

    def init(self, variables: Variables, data: ClientData, execution: PerClient) -> Agent:
        clients, size, replay = data.clients, self.size, self.replay
        held = f"{replay:,} times {clients + 1:,} sketches of {size:,} numbers"
        check_memory_for(held, 4 * replay * (clients + 1) * size)

        def start(variables: Variables, client: ClientView) -> Array:
            return sketch(tree.subtract(self.first(variables, client), variables), size)

        models = execution.per_client(start, variables, data)
        shape = ((clients + 1) * size, clients)
        network = self.network or _network(jax.random.key(0), shape[0], self.hidden, clients)
        if (found := (len(network.a), len(network.b_bias))) != shape:
            raise ValueError(f"network must have {shape} inputs and outputs, got {found}")
        asked = self._asked(clients)
        return Agent(
            network=network,
            target=network,
            optimizer=self._optimizer.init(network),
            models=models,
            server=jnp.zeros(size, jnp.float32),
            scale=jnp.maximum(jnp.sqrt(jnp.mean(models**2)), 1e-12),
            client=jnp.full(asked, clients, jnp.int32),
            answer=jnp.zeros(asked, jnp.float32),
            accuracy=jnp.float32(0),
            round=jnp.int32(0),
            states=jnp.zeros((replay, (clients + 1) * size), jnp.float32),
            chosen=jnp.zeros((replay, clients), bool),
            rewards=jnp.zeros(replay, jnp.float32),
        )

    def poll(self, key: Array, state: Agent, data: ClientData) -> Array:
        asked = self._asked(data.clients)
        if asked == data.clients:
            return jnp.arange(asked, dtype=jnp.int32)
        return distinct(key, asked, data.clients)

    def record_answers(self, state: Agent, client: Array, answers: Array) -> Agent:
        return state._replace(client=client, answer=answers)

    def draw(
        self, key: Array, state: Agent, data: ClientData, clients: Array, free: Array,
        visits: Array
    ) -> tuple[Array, Agent]:  # fmt: skip
        learning_key, acting_key = jax.random.split(key)
        t, sketches, replay = state.round, _sketches(state), self.replay
        samples = jnp.where(state.client < data.clients, client_sizes(data, state.client), 0)
        samples = samples.astype(jnp.float32)
        total, right = jnp.sum(samples), jnp.sum(samples * state.answer)
        accuracy = jnp.where(total > 0, right / jnp.maximum(total, 1), state.accuracy)
        # The reward of the last round; the one before the first round is overwritten later.
        reward = self.base ** (accuracy - self.target) - 1
        state = state._replace(
            accuracy=accuracy,
            states=state.states.at[t % replay].set(sketches),
            rewards=state.rewards.at[(t - 1) % replay].set(reward),
        )
        state = tree.select(t > 0, self._learn(learning_key, state), state)
        target = tree.select(t % self.copied == 0, state.network, state.target)
        slots = len(free)
        rank = jnp.argsort(jnp.argsort(-q_values(state.network, sketches)))
        coins, tickets = jax.random.split(acting_key)
        chance = self.explore * self.decay ** t.astype(jnp.float32)
        explored = jnp.sum(jax.random.uniform(coins, (slots,), jnp.float32) < chance)
        ticket = jax.random.uniform(tickets, rank.shape, jnp.float32)
        ticket = jnp.where(rank < slots - explored, 2.0, ticket)
        cohort = jax.lax.top_k(ticket, slots)[1].astype(jnp.int32)
        actions = jnp.zeros(data.clients, bool).at[cohort].set(True)
        chosen = state.chosen.at[t % replay].set(actions)
        return cohort, state._replace(target=target, chosen=chosen, round=t + 1)

    def see(self, state: Agent, client: Array, updates: Variables, moved: Variables) -> Agent:
        new = jax.vmap(lambda update: state.server + sketch(update, self.size))(updates)
        return state._replace(
            models=state.models.at[client].set(new, mode="drop"),
            server=state.server + sketch(moved, self.size),
        )

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.rmsprop(self.lr)

    def _asked(self, clients: int) -> int:
        return clients if self.evaluated is None else min(self.evaluated, clients)

    def _learn(self, key: Array, state: Agent) -> Agent:
        """Returns the agent after its steps, on rounds whose next state is known."""
        t, replay = state.round, self.replay
        known, q_of = jnp.minimum(t, replay - 1), jax.vmap(q_values, in_axes=(None, 0))

        def step(i: Array, carry: tuple[Network, PyTree]) -> tuple[Network, PyTree]:
            theta, kept = carry
            ago = jax.random.randint(jax.random.fold_in(key, i), (self.batch,), 0, known, jnp.int32)
            then = (t - 1 - ago) % replay
            after = state.states[(then + 1) % replay]
            best = jnp.argmax(q_of(theta, after), axis=1)
            following = jnp.take_along_axis(q_of(state.target, after), best[:, None], axis=1)
            target = state.rewards[then][:, None] + self.discount * following
            taken = state.chosen[then]

            def loss(theta: Network) -> Array:
                error = jnp.square(target - q_of(theta, state.states[then]))
                return jnp.sum(jnp.where(taken, error, 0)) / jnp.maximum(
                    jnp.sum(taken, dtype=jnp.float32), 1
                )

            updates, kept = self._optimizer.update(jax.grad(loss)(theta), kept, theta)
            return optax.apply_updates(theta, updates), kept

        theta, kept = jax.lax.fori_loop(0, self.steps, step, (state.network, state.optimizer))
        return state._replace(network=theta, optimizer=kept)


def q_values(network: Network, state: Array) -> Array:
    """Returns Q of each client in a state: ``f32[(N + 1) d] -> f32[N]``."""
    hidden = jax.nn.relu(state @ network.a + network.a_bias)
    return hidden @ network.b + network.b_bias


def sketch(model: Variables, size: int) -> Array:
    """Projects the trained weights onto ``size`` sums, each weight in one with a random sign.

    The signs and sums are the same in every run. It is linear, and preserves the inner product of
    two models in expectation.

    >>> model = Variables({"w": jnp.arange(300.0)}, {})
    >>> twice = Variables({"w": 2 * jnp.arange(300.0)}, {})
    >>> bool(jnp.allclose(sketch(twice, 8), 2 * sketch(model, 8))), sketch(model, 8).shape
    (True, (8,))
    """
    total = jnp.zeros(size, jnp.float32)
    for i, leaf in enumerate(jax.tree.leaves(model.params)):
        signs_key, sums_key = jax.random.split(jax.random.key(i))
        weights = leaf.reshape(-1).astype(jnp.float32)
        signed = weights * signs(signs_key, weights.shape, jnp.float32)
        place = jax.random.randint(sums_key, weights.shape, 0, size, jnp.int32)
        total = total.at[place].add(signed)
    return total


def _sketches(state: Agent) -> Array:
    """Returns s, ``f32[(N + 1) d]``."""
    return jnp.concatenate([state.models.reshape(-1), state.server]) / state.scale


def _network(key: Array, inputs: int, hidden: int, outputs: int) -> Network:
    one, two = jax.random.split(key)
    normal = jax.nn.initializers.he_normal()
    return Network(
        normal(one, (inputs, hidden), jnp.float32),
        jnp.zeros(hidden, jnp.float32),
        normal(two, (hidden, outputs), jnp.float32),
        jnp.zeros(outputs, jnp.float32),
    )
