"""Quantisation, as the page says to do it; see `python -m tests.quantised --help`."""
