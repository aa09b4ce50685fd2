"""The implementation of the commands ``fedjax_sim.bench``, ``partition``, ``report``, ``study``."""
