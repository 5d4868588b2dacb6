"""What one block of a class costs under a division of its indices: the one price list that planner and reports read."""

from autopar.pricing.degrees import divides, obstacles
from autopar.pricing.division import Boundary, Division, Placement, SiteConversion
from autopar.pricing.price import BlockPrice, RecomputePrice, price_block

__all__ = [
    "BlockPrice",
    "Boundary",
    "Division",
    "Placement",
    "RecomputePrice",
    "SiteConversion",
    "divides",
    "obstacles",
    "price_block",
]
