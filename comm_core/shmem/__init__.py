"""Symmetric memory: each rank owns a segment that the other ranks of its host can read. `posix.py` is for processes."""
