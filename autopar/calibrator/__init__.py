"""A machine in, its cluster profile out: every rank measures at once, as it will when it trains."""

from autopar.calibrator.calibrate import calibrate

__all__ = ["calibrate"]
