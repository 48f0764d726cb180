"""Reports of what was found: values with renderers; they print nothing and measure nothing.

`leaderboard` ranks candidates, of rows that `stored` reads; `explain` tells what dispatch does, `space`
counts and ranks a search space, `doctor` examines an installation. The page of `html` is made of `contents`
by `analysis` and `charts`; `text` makes names from elsewhere safe to show. Imports every room but `cli`,
which alone imports it.
"""
