"""A checkpoint, opened once: its source, config, family, weights' headers and record."""
