"""Benchmarks: run them as modules from the checkout's root, such as ``python -m benchmarks.peers``."""
