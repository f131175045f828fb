"""Facts of a model card."""
