"""A machine in, its cluster profile out: every rank measures at once, as it will when it trains."""

from autopar.calibrator.calibrate import calibrate
from autopar.calibrator.launch import Probe, probe_inputs

__all__ = ["Probe", "calibrate", "probe_inputs"]
