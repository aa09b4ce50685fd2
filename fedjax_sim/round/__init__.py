"""One round of every method: where the parts meet.

``algorithm`` is the round itself; ``placement`` gives slots their clients and rows, ``training`` is
what the clients do, ``timing`` how long it
takes, ``collecting`` what the server does, ``traffic`` counts bytes, ``start`` makes
the first state, ``own_models`` scores personal models, ``citation`` finds the papers.
"""

from fedjax_sim.round.algorithm import Algorithm, compose
from fedjax_sim.round.citation import cite
from fedjax_sim.round.parts import Parts

__all__ = ["Algorithm", "Parts", "cite", "compose"]
