"""The errors that this package raises. Each message names the given value, the accepted ones and a remedy."""


class HyperConnError(Exception):
    """Base of the package's errors."""


class UnsupportedCheckpointError(HyperConnError, ValueError):
    """A model or checkpoint that can't be read or converted."""


class ConversionError(HyperConnError, RuntimeError):
    """A conversion that failed, or impossible arguments of one."""


class VerificationError(HyperConnError, RuntimeError):
    """A checkpoint that fails verification."""


class HyperConnectionFileError(HyperConnError, ValueError):
    """A file of hyper-connections that can't be written, or can't be loaded into a model."""


class CardError(HyperConnError, ValueError):
    """A model card, or results for it, that can't be read or written."""


class PushError(HyperConnError, RuntimeError):
    """A push that is not allowed, or that the Hub refuses."""
