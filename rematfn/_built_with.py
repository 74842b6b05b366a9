"""Written by setup.py."""

TORCH = "2.13.0"
