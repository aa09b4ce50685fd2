"""FAVOR: a Q-network that sees all models chooses the clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    PerClient,
    Poll,
    PyTree,
    Selection,
    SetupTraffic,
    Variables,
    concrete,
    part,
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
    """What the selection remembers; C rounds are replayed.

    Attributes:
        network: θ.
        target: θ', an older θ.
        optimizer: its state.
        models: ``f32[N, d]``, the clients' last models.
        server: ``f32[d]``, the server's.
        scale: ``f32[]``, what both are divided by.
        client: ``int32[K]``, those who have answered; N for none.
        answer: ``f32[K]``, their accuracies.
        accuracy: ``f32[]``, the mean of the last answers by sample.
        round: ``int32[]``, rounds begun.
        states: ``f32[C, (N + 1) d]``, s by round modulo C.
        chosen: ``bool[C, N]``.
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


@part
def deep_q(
    score: Callable[[Variables, ClientView], Array],
    first: Callable[[Variables, ClientView], Variables],
    *,
    target: float = 0.99,
    base: float = 64.0,
    discount: float = 0.999,
    explore: float = 0.5,
    decay: float = 0.95,
    lr: float = 1e-3,
    steps: int = 1,
    batch: int = 32,
    replay: int = 200,
    copied: int = 10,
    size: int = 100,
    hidden: int = 512,
    evaluated: int | None = None,
    network: Network | None = None,
) -> Selection:
    r"""The clients with the largest values of a double deep Q-network (FAVOR).

    .. math:: U_t = \text{the } m \text{ largest of } Q(s_t, \cdot; \theta), \qquad
              s_t = (z^1, \dots, z^N, z), \qquad r_t = \Xi^{A_{t+1} - \Omega} - 1, \\
              \min_\theta \bigl(r_t + \gamma\, Q(s_{t+1}, \arg\max_a Q(s_{t+1}, a; \theta); \theta')
              - Q(s_t, k; \theta)\bigr)^2, \qquad k \in U_t

    with a sketch z in d numbers of the server model and of each client's last model, and
    :math:`A_t`, the accuracy of the server model in round t. Each slot goes, with probability
    :math:`\epsilon\,\delta^t`, to a client drawn uniformly instead. In every round the agent takes
    some steps of RMSprop on B rounds drawn from the last C.

    The authors train the agent in many federated runs, until each reaches its target, before the
    one in which it chooses. Here it learns within the run that it chooses for, of which most rounds
    may be over before it knows anything; or it is given a ``network`` that another run has learnt
    (``state.selection.network``). They choose one client a round while it learns; here each of the
    m is an action with the reward of all. They compress the models by principal components of the
    first ones; here a fixed random projection serves (each weight, with a random sign, is added to
    one of d sums), of the difference from the first server model, divided by its root mean square
    over the clients' first models. They measure the accuracy on samples of the server; here clients
    tell it of their own.

    Args:
        score: ``(variables, client) -> f32[]``, A of one client
            (:func:`fedjax_sim.reports.accuracy`); the mean counts samples.
        first: ``(variables, client) -> variables``, the model that a client trains before the first
            round.
        target: Ω.
        base: Ξ.
        discount: γ.
        explore: ε.
        decay: δ.
        lr: of the agent.
        steps: of the agent in a round; 0 if it learns no more.
        batch: B.
        replay: C; memory: 4 C (N + 1) d bytes.
        copied: the rounds after which θ' becomes θ.
        size: d.
        hidden: H, the units of Q's hidden layer.
        evaluated: the clients that are asked in each round, drawn uniformly; None for all.
        network: θ at the start; None: drawn, the same in all runs.

    Returns:
        A selection for models that do not outlive a round.

    Raises:
        ValueError: if a number is out of range; when it starts, if the network does not fit, or
            the replay memory is larger than this machine's.

    Source: Wang et al. 2020 <https://doi.org/10.1109/INFOCOM41043.2020.9155494>, sections III and
    IV.
    """
    for name, value in {"discount": discount, "explore": explore, "decay": decay}.items():
        if concrete(value) and not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
    if concrete(base) and not base > 1:
        raise ValueError(f"base must be more than 1, got {base}")
    if concrete(lr) and not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    if replay < 2:
        raise ValueError(f"replay must be at least 2, got {replay}")
    counts = {"batch": batch, "copied": copied, "size": size, "hidden": hidden}
    for name, count in (*counts.items(), ("evaluated", evaluated)):
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    optimizer = optax.rmsprop(lr)

    def asked(clients: int) -> int:
        return clients if evaluated is None else min(evaluated, clients)

    def init(variables: Variables, data: ClientData, execution: PerClient) -> Agent:
        clients = data.clients
        held = f"{replay:,} times {clients + 1:,} sketches of {size:,} numbers"
        check_memory_for(held, 4 * replay * (clients + 1) * size)

        def start(variables: Variables, client: ClientView) -> Array:
            return sketch(tree.subtract(first(variables, client), variables), size)

        models = execution.per_client(start, variables, data)
        own = network or _network(jax.random.key(0), (clients + 1) * size, hidden, clients)
        wanted = ((clients + 1) * size, clients)
        if (found := (len(own.a), len(own.b_bias))) != wanted:
            raise ValueError(f"network must have {wanted} inputs and outputs, got {found}")
        return Agent(
            network=own,
            target=own,
            optimizer=optimizer.init(own),
            models=models,
            server=jnp.zeros(size, jnp.float32),
            scale=jnp.maximum(jnp.sqrt(jnp.mean(models**2)), 1e-12),
            client=jnp.full(asked(clients), clients, jnp.int32),
            answer=jnp.zeros(asked(clients), jnp.float32),
            accuracy=jnp.float32(0),
            round=jnp.int32(0),
            states=jnp.zeros((replay, (clients + 1) * size), jnp.float32),
            chosen=jnp.zeros((replay, clients), bool),
            rewards=jnp.zeros(replay, jnp.float32),
        )

    def whom(key: Array, state: Agent, data: ClientData) -> Array:
        if asked(data.clients) == data.clients:
            return jnp.arange(data.clients, dtype=jnp.int32)
        return distinct(key, asked(data.clients), data.clients)

    def tell(state: Agent, client: Array, answers: Array) -> Agent:
        return state._replace(client=client, answer=answers)

    def draw(
        key: Array, state: Agent, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, Agent]:
        learning, acting = jax.random.split(key)
        t, here = state.round, _seen(state)
        samples = jnp.where(state.client < data.clients, client_sizes(data, state.client), 0)
        samples = samples.astype(jnp.float32)
        total, right = jnp.sum(samples), jnp.sum(samples * state.answer)
        accuracy = jnp.where(total > 0, right / jnp.maximum(total, 1), state.accuracy)
        # What the last round's choice has come to; before the first that is written over later.
        reward = base ** (accuracy - target) - 1
        state = state._replace(
            accuracy=accuracy,
            states=state.states.at[t % replay].set(here),
            rewards=state.rewards.at[(t - 1) % replay].set(reward),
        )
        state = tree.select(t > 0, learnt(learning, state), state)
        renewed = tree.select(t % copied == 0, state.network, state.target)
        slots = len(free)
        rank = jnp.argsort(jnp.argsort(-q_values(state.network, here)))
        coins, tickets = jax.random.split(acting)
        chance = explore * decay ** t.astype(jnp.float32)
        left = jnp.sum(jax.random.uniform(coins, (slots,), jnp.float32) < chance)
        ticket = jax.random.uniform(tickets, rank.shape, jnp.float32)
        ticket = jnp.where(rank < slots - left, 2.0, ticket)
        drawn = jax.lax.top_k(ticket, slots)[1].astype(jnp.int32)
        actions = jnp.zeros(data.clients, bool).at[drawn].set(True)
        return drawn, state._replace(
            target=renewed, chosen=state.chosen.at[t % replay].set(actions), round=t + 1
        )

    def learnt(key: Array, state: Agent) -> Agent:
        """The agent after its steps; the transitions of rounds before the last state are known."""
        t = state.round
        known, q_of = jnp.minimum(t, replay - 1), jax.vmap(q_values, in_axes=(None, 0))

        def step(i: Array, carry: tuple[Network, PyTree]) -> tuple[Network, PyTree]:
            theta, kept = carry
            back = jax.random.randint(jax.random.fold_in(key, i), (batch,), 0, known, jnp.int32)
            then = (t - 1 - back) % replay
            after = state.states[(then + 1) % replay]
            best = jnp.argmax(q_of(theta, after), axis=1)
            ahead = jnp.take_along_axis(q_of(state.target, after), best[:, None], axis=1)
            wanted = state.rewards[then][:, None] + discount * ahead
            taken = state.chosen[then]

            def loss(theta: Network) -> Array:
                away = jnp.square(wanted - q_of(theta, state.states[then]))
                return jnp.sum(jnp.where(taken, away, 0)) / jnp.maximum(
                    jnp.sum(taken, dtype=jnp.float32), 1
                )

            updates, kept = optimizer.update(jax.grad(loss)(theta), kept, theta)
            return optax.apply_updates(theta, updates), kept

        theta, kept = jax.lax.fori_loop(0, steps, step, (state.network, state.optimizer))
        return state._replace(network=theta, optimizer=kept)

    def see(state: Agent, client: Array, updates: Variables, moved: Variables) -> Agent:
        ours = jax.vmap(lambda update: state.server + sketch(update, size))(updates)
        return state._replace(
            models=state.models.at[client].set(ours, mode="drop"),
            server=state.server + sketch(moved, size),
        )

    def setup_traffic(variables: Variables, data: ClientData) -> SetupTraffic:
        once = data.clients * tree.num_bytes(variables)
        return SetupTraffic(once, once)

    return Selection(
        init=init,
        draw=draw,
        sticky=False,
        see=see,
        setup_traffic=setup_traffic,
        poll=Poll(whom, tell, score),
        needs=(OWN_SAMPLES,),
    )


def q_values(network: Network, state: Array) -> Array:
    """Q of each client in a state: ``f32[(N + 1) d] -> f32[N]``."""
    hidden = jax.nn.relu(state @ network.a + network.a_bias)
    return hidden @ network.b + network.b_bias


def sketch(model: Variables, size: int) -> Array:
    """The trained weights in ``size`` sums, each weight in one of them with a random sign.

    The signs and sums are the same in every run. It is linear, and keeps the inner product of two
    models on average.

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


def _seen(state: Agent) -> Array:
    """s: ``f32[(N + 1) d]``."""
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
