"""The tools that people train with, run as their users run them; see `python -m tests.campaigns.trainers --help`."""
