"""The version, in a leaf that every floor may read."""

__version__ = "0.1.0"
