"""What the hyper-connections of a model do: unfolded matrices, similarities, streams, coefficients; and plots."""
