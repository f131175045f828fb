"""In a source checkout `hf_hyperconn.conversion` is the folder `conversion/`; a wheel holds it here."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "conversion")]
