"""A block class under a division of its indices -> seconds, bytes, collectives: the one price list."""

from autopar.pricing.bill import BlockPrice, RecomputePrice, Setting
from autopar.pricing.division import Boundary, Division, SiteConversion, State, undivided
from autopar.pricing.local import expert_atoms
from autopar.pricing.price import price_block

__all__ = [
    "BlockPrice",
    "Boundary",
    "Division",
    "RecomputePrice",
    "Setting",
    "SiteConversion",
    "State",
    "expert_atoms",
    "price_block",
    "undivided",
]
