# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The start of mHC and iHC: what a sub-layer reads and keeps of each stream before training."""

FAVOURED_READ = 0.7  # of stream k mod n, by sub-layer k; the others share the rest
KEPT = 0.96  # of each stream, by mixing, before the iteration; the others share the rest
