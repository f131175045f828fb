"""Reading, writing and copying files of any checkpoint."""
