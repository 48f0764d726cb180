"""A program's products and how often it computes each: `tunegemm record` or `shapes` writes them, `tune`
reads them.

`models` reads a model's linear layers, and `engines` turns them into the products of an engine.
"""

from tunegemm.describe.workload.demand import Demand, demands, total
from tunegemm.describe.workload.foreign import read
from tunegemm.describe.workload.products import Product, Workload, merge

__all__ = ["Demand", "Product", "Workload", "demands", "merge", "read", "total"]
