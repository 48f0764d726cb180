"""A program's products and how often it computes each: `tunegemm record` or `shapes` writes, `tune` reads.

`models` reads what linear layers a model has, `engines` says what an engine makes of them.
"""

from tunegemm.describe.workload.demand import Demand, demands, total
from tunegemm.describe.workload.foreign import read, read_all
from tunegemm.describe.workload.products import Product, Workload, merge

__all__ = ["Demand", "Product", "Workload", "demands", "merge", "read", "read_all", "total"]
