"""The converter: Pre-Norm checkpoint in, hyper-connection checkpoint out, exactly."""
