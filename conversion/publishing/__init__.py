"""Checks and plans before a push."""
