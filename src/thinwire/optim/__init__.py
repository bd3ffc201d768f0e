"""Papers that own the update rule. Each is a ``torch.optim.Optimizer`` that ``thinwire.attach`` takes."""

from typing import Any

from thinwire.optim.apmsqueeze import APMSqueeze
from thinwire.optim.bmuf import BMUF
from thinwire.optim.dist_ef_sgdm import DistEFBlockSGDM
from thinwire.optim.gossip import Gossip
from thinwire.optim.root_sgd import RootSGD
from thinwire.optim.slowmo import LocalSGD, SlowMo

__all__ = ["BMUF", "OPTIMIZERS", "APMSqueeze", "DistEFBlockSGDM", "Gossip", "LocalSGD", "RootSGD", "SlowMo"]

OPTIMIZERS: dict[str, type[Any]] = {
    "apm": APMSqueeze,
    "dist-ef-sgdm": DistEFBlockSGDM,
    "slowmo": SlowMo,
    "local-sgd": LocalSGD,
    "bmuf": BMUF,
    "gossip": Gossip,
    "root-sgd": RootSGD,
}
"""By the name that the command line has for them."""
