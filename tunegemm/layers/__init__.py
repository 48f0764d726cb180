"""Layers of a model: finds parts of a graph of Dynamo, Inductor or an engine that one kernel can compute.

`patterns` declares the patterns and their replacements; `fusion` is the one pass over a graph; `sites` are
the calls that it inserts; each picks its kernel once per number of rows. `backend` is torch.compile's backend
`tunegemm`, `inductor` the same pass in Inductor, `modules` what `patch` does without a graph.
"""
