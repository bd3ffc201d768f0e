"""Train over a thin wire: data-parallel PyTorch that communicates 10 to 1000 times less.

>>> import thinwire as tw
>>> sync = tw.attach(model, "acp:rank=4")
"""

from thinwire import optim
from thinwire.core.combine import Rule, after, error_feedback, where
from thinwire.core.method import Method
from thinwire.errors import ExchangeError
from thinwire.registry import parse as method
from thinwire.registry import price
from thinwire.runtime.attach import attach
from thinwire.runtime.ddp import comm_hook
from thinwire.runtime.synchronizer import Synchronizer
from thinwire.simulation import Simulation

__all__ = [
    "ExchangeError",
    "Method",
    "Rule",
    "Simulation",
    "Synchronizer",
    "after",
    "attach",
    "comm_hook",
    "error_feedback",
    "method",
    "optim",
    "price",
    "where",
]
