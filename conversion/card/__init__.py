"""The model card of a conversion: its facts, its text, and scores that were measured."""

from .card import WrittenCard, write_card

__all__ = ["WrittenCard", "write_card"]
