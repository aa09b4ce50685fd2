"""``python -m fedjax_sim.report``: runs side by side, as a page, tables and pictures."""
