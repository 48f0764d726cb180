"""Serving engines: a module for each, with the function that its entry point names, and shared code.

An engine runs that function in each of its processes. Our products then come before the engine's own, which
still run if there is no record. If another version of the engine lacks what we replace, nothing changes.
"""
