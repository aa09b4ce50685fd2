"""What the commands are made of; the doors are ``bench`` and ``python -m fedjax_sim.partition``."""
