"""Comparing a conversion with its base and with its record."""
