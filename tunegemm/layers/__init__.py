"""Finds the parts of a graph of Dynamo, Inductor or an engine that one kernel can compute.

`patterns` declares the patterns and their replacements, and `fusion` applies them in one pass over a graph.
`sites` are the calls that it inserts; each picks its kernel once per number of rows. `backend` is
torch.compile's backend `tunegemm`, `inductor` runs the same pass in Inductor, and `modules` has `patch`,
which needs no graph.
"""
