"""The engines that people serve with, run as their users run them; see `python -m tests.campaigns.engines --help`."""
