"""Users' engines: one module for each, with the function that its entry point names, and what they share.

An engine runs the function in each of its processes. Each puts our products before the engine's own, which
are called where nothing is recorded. What an engine of another version does not have stays its own.
"""
