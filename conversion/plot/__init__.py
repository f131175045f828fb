"""Pictures of a checkpoint's connections."""

from .plot import PICTURES, draw

__all__ = ["PICTURES", "draw"]
