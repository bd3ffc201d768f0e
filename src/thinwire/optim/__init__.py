"""Papers that own the update rule. Each is a ``torch.optim.Optimizer`` that ``thinwire.attach`` takes."""

from thinwire.optim.apmsqueeze import APMSqueeze
from thinwire.optim.dist_ef_sgdm import DistEFBlockSGDM

__all__ = ["OPTIMIZERS", "APMSqueeze", "DistEFBlockSGDM"]

OPTIMIZERS: dict[str, type[APMSqueeze] | type[DistEFBlockSGDM]] = {
    "apm": APMSqueeze,
    "dist-ef-sgdm": DistEFBlockSGDM,
}
"""By the name that the command line has for them."""
