"""Every tolerance of the stand-ins, with its reason."""

# float32 logits with and without a cache, in batches of other shapes: sums in another order
CACHED = {"rtol": 1e-4, "atol": 1e-4}

# the same in bfloat16, whose values have 8 bits
HALF_PRECISION = {"rtol": 0.05, "atol": 0.05}
