"""Attention whose queries and keys evolve as a coupled system before they are scored."""

__version__ = "0.0.1"
