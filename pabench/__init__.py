"""pabench: does a paged-attention kernel give the answers of dense attention, and how fast?"""

__version__ = "0.1.0"
