"""How large a store gets, and what it has to carry: a capacity model, made of costs that were measured.

`costs` has the numbers, each with its origin; `model` does the sums. Neither opens a store.
"""

from onefold.sizing.costs import COSTS, Costs
from onefold.sizing.model import Contradiction, Size, Workload, size

__all__ = ["COSTS", "Contradiction", "Costs", "Size", "Workload", "size"]
