"""Serving engines: one module for each, with the function that its entry point names, and what they share.

An engine runs that function in each of its processes. It puts our products before the engine's own, which run
where nothing is recorded. If another version of an engine lacks what we replace, the engine keeps its own.
"""
