"""Ways to move rows between ranks. `base.py` says what a backend is, `registry.py` which there are."""
