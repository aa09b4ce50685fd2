"""One round of every method, composed from parts.

``algorithm`` composes, ``parts`` holds the parts, ``fit`` rejects combinations, ``start`` makes the
initial state. ``stages`` is a round: read its ``step`` first. In the order of its calls,
``polling`` polls clients before the draw, ``arrivals`` simulates clients that return one by one,
``placement`` assigns clients and rows to slots, ``timing`` computes durations, ``training`` runs
the clients, ``sending`` processes their messages, ``collecting`` updates the server, ``traffic``
counts bytes; ``exchanging`` determines which leaves travel. After the rounds, ``finishing``
collects models in flight, ``own_models`` scores personal models, ``private`` computes ε and
``citation`` finds the papers.
"""

from fedjax_sim.round.algorithm import Algorithm, compose
from fedjax_sim.round.citation import cite
from fedjax_sim.round.parts import Parts

__all__ = ["Algorithm", "Parts", "cite", "compose"]
