"""A family: a model type of Transformers whose layers get connections, known by Transformers' source alone."""
