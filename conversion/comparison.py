"""A comparison with the base, noted in the record of a conversion that lacked one."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from hf_hyperconn.errors import ConversionError

from .files import replace_file
from .moving import held
from .reading import read_text
from .record import is_verified, read_record
from .source import RECORD, LocalSource


def record_verification(folder: Path, report: Mapping, before: str) -> bool:
    """Note in the record of a conversion that it was compared with its base and equals it, if that isn't there yet.

    report: of a verification that passed, as `VerificationReport.as_dict` gives it. Nothing is noted of one without a
        base, or of a trained checkpoint, which is no longer what was recorded.
    before: the file of the record when verification began.

    Returns whether the record was changed. Raises `ConversionError` when it can't be written, is another by now, or
    another command is at work on the folder.
    """
    record = read_record(LocalSource(folder))
    if record is None or is_verified(record) or report["trained"] or report["changed"] != 0:
        return False
    path = folder / RECORD
    try:
        with held(Path(os.path.realpath(folder))):
            if read_text(path) != before:
                raise ConversionError(f"'{folder}' was changed while it was verified. Verify it again.")
            replace_file(path, (json.dumps({**record, "verification": report}, indent=2) + "\n").encode())
    except OSError as error:
        raise ConversionError(
            f"'{folder}' is equal to its base, but '{path}' can't be written: {error.strerror}. Allow that, and "
            f"verify again."
        ) from error
    return True
