"""A conversion against its base and against its record."""

from .verify import MODES, VerificationReport, fault_of_mode, verify_checkpoint

__all__ = ["MODES", "VerificationReport", "fault_of_mode", "verify_checkpoint"]
