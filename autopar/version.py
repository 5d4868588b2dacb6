"""The version that plans are stamped with."""

__version__ = "0.1.0"
