"""The errors this package raises on purpose. Each message says what was received and what to do next."""


class HyperConnError(Exception):
    """Base of the package's errors."""


class UnsupportedCheckpointError(HyperConnError, ValueError):
    """The model or checkpoint given cannot be converted."""


class ConversionError(HyperConnError, RuntimeError):
    """A conversion could not be carried out."""


class VerificationError(HyperConnError, RuntimeError):
    """A converted checkpoint differs from what it should be."""


class HyperConnectionFileError(HyperConnError, ValueError):
    """Hyper-connections can't be written to a file, or those of a file can't be given to a model."""


class CardError(HyperConnError, ValueError):
    """A model card can't be read or written, or what it should report can't."""


class PushError(HyperConnError, RuntimeError):
    """A checkpoint may not be pushed so, or the Hub does not take it."""
