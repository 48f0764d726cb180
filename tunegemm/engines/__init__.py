"""Serving engines: one module for each, with the function that its entry point names, and what they share.

An engine runs that function in each of its processes. Our products then come before the engine's own, which
still run where there is no record. If another version of the engine lacks what we replace, nothing changes.
"""
