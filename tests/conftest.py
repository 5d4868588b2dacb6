"""Settings that all tests share."""

from hypothesis import settings

# How long an example takes depends on what else runs on the machine: no test is timed.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
