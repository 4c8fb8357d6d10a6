"""Models: find them (cache, hub, PyPI wheels, files), load them, describe their attention."""
