"""Every tolerance of the tests, with its reason. What is not here is asserted with torch.equal."""

# float64 module against a float64 loop: sums of at most (N + 1) * D terms of order one, in another order
LOOP_FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}

# float32 against float64: 24-bit rounding of sums over D = 32 and N = 8
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}

# bfloat16 streams with float32 coefficients against float64: one rounding to 8 bits of values of order ten
BFLOAT16_STREAMS = {"rtol": 2**-8, "atol": 2**-8}

# the same float32 sums over N = 8 as matrix products and written out: another order of summation
TWO_FORMS = {"rtol": 1e-5, "atol": 1e-5}

# eager and compiled model of the same float32 weights: Inductor fuses norms and sums in another order
COMPILED = {"rtol": 1e-4, "atol": 1e-4}

# mHC mixes deviations from the mean, which takes rows of its matrix to sum to 1; DeepSeek-V4's arithmetic leaves them
# eps = 1e-6 short of it, in streams of order ten
ROW_SUMS = {"rtol": 2e-5, "atol": 2e-5}

# logits of order 20 of a model converted to mHC or iHC, float32: the reads of each sub-layer sum to 1 within an ulp
READS_SUM_TO_ONE = {"rtol": 1e-5, "atol": 1e-4}

# float32 values of order 100 by a matrix product and by plain sums: a few roundings in another order
ANOTHER_ORDER = {"rtol": 1e-6, "atol": 1e-6}

# fused kernels with float32 streams against float64, of the largest value: sums over D up to 5129 and 700 tokens,
# through three sub-layers' worth of norms and tanh; a tanh by the exponential is within 1e-7 of one
KERNELS_FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}

# the same with 16-bit streams, each rounded to 8 or 11 bits when written, and once more on the way
KERNELS_BFLOAT16 = {"rtol": 2**-6, "atol": 2**-6}
KERNELS_FLOAT16 = {"rtol": 2**-8, "atol": 2**-8}

# loss near 5 of one model under bfloat16 autocast, by the kernels and by plain torch: branches round to 8 bits values
# that differ by a float32 rounding
AUTOCAST_BFLOAT16 = {"rtol": 1e-2, "atol": 1e-2}

# float32 logits of order ten of a model with LoRA beside its weights, and merged into them: a sum of products in
# another order
MERGED = {"rtol": 1e-5, "atol": 1e-5}

# log-probabilities of a serving engine and of Transformers, float32: other kernels for attention and matrix products,
# and their tables of keys and values, through three layers
ENGINE_LOGPROBS = {"rtol": 0.0, "atol": 2e-3}

# how many times as far as its base's a trained model's log-probabilities in bfloat16 may be from those in float32: the
# engine rounds hyper-connections to 8 bits, too, as it does the base's weights
ROUNDED_AS_THE_BASE = 2.0

# how many times as far as its base's quantisation may move a conversion's logits, in units of how far 1 % of random
# noise on the same matrices moves each: in these units int8 rounding of the weights, in float32, moved bases and
# conversions of three seeds, untrained and trained in several ways, by 0.685 to 0.720
QUANTISED_AS_THE_BASE = 1.1

# derivatives in float64 against central differences with steps of 1e-5, of the largest value: an error of order 1e-10
# times a third derivative, and of 1e-16 / 1e-5
FINITE_DIFFERENCES = {"rtol": 1e-5}

# coefficients and gradients by a LayerNorm of streams of mean 10 or 100 and deviation 0.01, float32 against float64,
# of the largest value: the mean is rounded to 1e-6 or 8e-6, a ten-thousandth or a thousandth of the deviation
LARGE_MEANS = {10: {"rtol": 0.0, "atol": 2e-4}, 100: {"rtol": 0.0, "atol": 2e-3}}

# logits of order five by ONNX Runtime and by torch, float32: other kernels for matrix products, softmax and tanh
ONNX = {"rtol": 1e-5, "atol": 1e-4}
# losses near 4 of 20 steps of one run on one process and on two ranks, which sum gradients in another order
RANKS = {"rtol": 1e-5, "atol": 0.0}
# the same with torch's Muon, which orthogonalizes in bfloat16, where a float32 rounding may flip one to 8 bits
RANKS_MUON = {"rtol": 1e-4, "atol": 0.0}

# float32 logits of order ten of a model whose matrices two ranks share, which sum products in another order
RANKS_LOGITS = {"rtol": 1e-4, "atol": 1e-4}

# losses near 4 under bfloat16 autocast: a float32 rounding may flip one to 8 bits, which training carries on
RANKS_BFLOAT16 = {"rtol": 5e-3, "atol": 0.0}

# float32 gradients of a batch of four rows, summed over its tokens at once and by halves
REDUCED_GRADIENTS = {"rtol": 1e-4, "atol": 1e-6}

# operations of the bases in the HC paper's Table 8, which count more than the matrices do, such as norms
BASE_FLOPS_OF_TABLE_8 = {"rel": 2e-4}

# memory of a process, from which small buffers, those of coefficients, may be missing: 1 % of what connections keep
MEASURED_MEMORY = {"rel": 0.01}

# bytes a channel, token and layer from two figures of the HC paper's Table 9, each rounded to 0.01 GB
PRINTED_MEMORY = {"abs": 0.02}

# three updates of Muon with entries near 0.02, in float32 and in bfloat16: 15 products rounded to 8 bits
ORTHOGONAL_BFLOAT16 = {"rtol": 0, "atol": 4e-3}

# time of a step by bytes and operations alone, against a measured one, both as multiples of the plain model's
ESTIMATED_TIME = {"abs": 0.07}
