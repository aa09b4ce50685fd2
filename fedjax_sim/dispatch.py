"""Which model a slot starts from when it leaves the server."""

from __future__ import annotations

from fedjax_sim.base import Dispatch


def latest() -> Dispatch:
    """The server model w_t, the same for all."""
    return Dispatch(
        init=lambda variables: (),
        send=lambda key, state, server, client: (server, ()),
        absorb=lambda state, server, models, weights, cohort: state,
    )
