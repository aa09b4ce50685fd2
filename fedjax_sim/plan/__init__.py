"""Which clients train, and when: selection, flight and redistribution."""
