"""What users have today, doing the same work as `fedjax_sim` in `speed.py`."""
