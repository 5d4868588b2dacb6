"""A block class under a division of its indices -> seconds, bytes, collectives: the one price list."""

from autopar.pricing.division import Boundary, Division, SiteConversion, State, undivided
from autopar.pricing.price import BlockPrice, RecomputePrice, Setting, price_block

__all__ = [
    "BlockPrice",
    "Boundary",
    "Division",
    "RecomputePrice",
    "Setting",
    "SiteConversion",
    "State",
    "price_block",
    "undivided",
]
