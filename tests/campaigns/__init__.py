"""Long runs beside the tests. Each has a command in the Makefile; most write what they find into `docs/`."""
