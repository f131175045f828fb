"""`python -m hf_hyperconn.conversion`."""

from .cli import main

raise SystemExit(main())
