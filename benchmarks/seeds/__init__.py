"""The tables of the documents that tunegemm grew from, measured anew: `python -m benchmarks.seeds`."""
