"""Turns results into values with renderers; prints nothing and measures nothing.

`leaderboard` ranks candidates, of one database or of all layers; `explain` says what dispatch does, `space`
counts and ranks a search space, `doctor` examines an installation. `analysis` and `charts` turn `contents`
into the page of `html`; `text` makes foreign names safe to show. Imports every room but `cli`; only `cli`
imports it.
"""
