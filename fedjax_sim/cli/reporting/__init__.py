"""``python -m fedjax_sim.report``: compares runs in a page, tables and pictures."""
