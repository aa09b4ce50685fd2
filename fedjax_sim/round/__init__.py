"""One round of every method, composed from parts.

``algorithm`` composes, ``stages`` is a round; ``placement`` gives slots their clients and rows,
``training`` runs the clients, ``timing`` computes durations, ``collecting`` updates the server,
``traffic`` counts bytes, ``start`` makes the initial state, ``own_models`` scores personal models,
``citation`` finds the papers.
"""

from fedjax_sim.round.algorithm import Algorithm, compose
from fedjax_sim.round.citation import cite
from fedjax_sim.round.parts import Parts

__all__ = ["Algorithm", "Parts", "cite", "compose"]
