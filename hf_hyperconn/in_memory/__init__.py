"""Conversion of a model that is already loaded."""
