"""What a client does: local updates, their objectives, corrections, transforms and reports."""
