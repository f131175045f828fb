"""Quantisation, as the page says to do it; see `python -m tests.campaigns.quantised --help`."""
