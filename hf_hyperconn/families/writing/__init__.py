"""Writing the two files of a family: its config and its models."""
