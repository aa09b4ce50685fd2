"""Server updates of models with low-rank adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Gathered, Need, Positive, PyTree, Server, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT, ONE_MODEL, OWN_ROWS, PLAIN_MEAN, SYNCHRONOUS
from fedjax_sim.engine.order import keep_whole
from fedjax_sim.models.layers import fan_in_uniform
from fedjax_sim.models.leaves import path_of
from fedjax_sim.models.wrappers import is_lora

ALONE = Need(
    "server",
    "to be the only server update, as it moves matrices that no client sends",
    lambda parts: parts.server.moves is not None,
    "server=exact_lora(...) outside chain and other servers",
)
FROZEN = Need(
    "exchange",
    "a frozen trunk",
    lambda parts: parts.exchange.frozen is not None,
    "exchange=split(frozen=leaves.named('trunk'))",
)


class exact_lora(Server):
    r"""Aggregates the products of adapters exactly: the server adds the missing part to W.

    .. math:: A \leftarrow \sum_k p_k A_k, \qquad B \leftarrow \sum_k p_k B_k, \qquad
              W \leftarrow W + \frac{\alpha}{r} \Bigl(\sum_k p_k A_k B_k - A B\Bigr)

    This is FedEx-LoRA. FedIT only averages A and B, and the product of the means is not the mean of
    the products. With ``restart`` it is FLoRA: the whole mean of the products is added to W, A is
    redrawn, and B is 0. Clients receive the adapted matrices W in every round, and send only A and
    B.

    Args:
        restart: whether each round begins with new adapters, as in FLoRA.
        alpha: α of :func:`fedjax_sim.models.lora`; None: r.

    Raises:
        ValueError: in the first round, if the model is not one of :func:`fedjax_sim.models.lora`,
            or the exchange does not freeze its trunk.

    Source: Singhal et al. 2025 <https://arxiv.org/abs/2410.09432>, section 4 (FedEx-LoRA); Wang et
    al. 2024 <https://arxiv.org/abs/2409.05976>, section 3 (FLoRA).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> model = fs.models.lora(fs.models.logistic((4,), 3), rank=2)
        >>> train = fs.leaves.named("A", "B")
        >>> local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), trained=train)
        >>> fedex = fs.fedavg(local, clients_per_round=5).replace(
        ...     exchange=fs.exchange.split(frozen=fs.leaves.named("trunk")),
        ...     server=fs.server.exact_lora(),
        ... )
    """

    restart: bool = False
    alpha: Positive | None = None

    needs = (PLAIN_MEAN, ONE_MODEL, NO_FLIGHT, SYNCHRONOUS, OWN_ROWS, FROZEN, ALONE)

    def moves(self, variables: Variables) -> Variables:
        params = variables.params
        if not is_lora(variables):
            raise ValueError("server exact_lora() needs a model of fs.models.lora(model, rank)")
        none: Variables = jax.tree.map(lambda leaf: False, variables)
        trunk = jax.tree_util.tree_map_with_path(
            lambda entries, leaf: path_of(entries) in params["A"], params["trunk"]
        )
        return none._replace(params=none.params | {"trunk": trunk})

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        params, weights = server.params, gathered.weights
        present, share = weights > 0, weights / tree.row_sum(weights)
        moved = {part: dict(step.params[part]) for part in "AB"}

        def sent(part: str, path: str) -> Array:
            start = gathered.cohort.received.params[part][path]
            rows = start + gathered.updates.params[part][path]
            return keep_whole(jnp.where(tree.expand(present, rows), rows, 0))

        def change(entries: tuple[object, ...], w: Array) -> Array:
            path = path_of(entries)
            a, b = (params[part][path] for part in "AB")
            rows = sent("A", path) * tree.expand(share, a[None])
            product = jnp.einsum("kmr,krn->mn", rows, sent("B", path))
            if self.restart:
                number = [*params["A"]].index(path)
                drawn = fan_in_uniform(len(a))(jax.random.fold_in(key, number), a.shape, a.dtype)
                moved["A"][path], moved["B"][path] = drawn - a, -b
            after = [params[part][path] + moved[part][path] for part in "AB"]
            factor = 1 if self.alpha is None else self.alpha / len(b)
            return (factor * (product - after[0] @ after[1])).reshape(w.shape)

        trunk = jax.tree_util.tree_map_with_path(change, params["trunk"])
        return step._replace(params={**step.params, **moved, "trunk": trunk}), state
