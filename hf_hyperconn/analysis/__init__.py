"""Analysis of a model's connections: unfolded matrices, similarities, streams, coefficients; and plots."""
