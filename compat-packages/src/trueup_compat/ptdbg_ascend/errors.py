"""The exception of ptdbg_ascend, with the numbers that scripts look at."""

from __future__ import annotations

from trueup.foundation.model import TrueupError


class CompareException(TrueupError):
    """What went wrong; ``code`` is the tool's number of it. Version 2.3 ended the process instead, with status 0."""

    NONE_ERROR, INVALID_PATH_ERROR, OPEN_FILE_ERROR, CLOSE_FILE_ERROR, READ_FILE_ERROR, WRITE_FILE_ERROR = range(6)
    INVALID_FILE_ERROR, PERMISSION_ERROR, INDEX_OUT_OF_BOUNDS_ERROR, NO_DUMP_FILE_ERROR, INVALID_DATA_ERROR = range(6, 11)
    INVALID_PARAM_ERROR, INVALID_DUMP_RATIO, INVALID_DUMP_FILE, UNKNOWN_ERROR, INVALID_DUMP_MODE = range(11, 16)
    PARSE_FILE_ERROR, INVALID_COMPARE_MODE, OVER_SIZE_FILE, INVALID_SUMMARY_MODE = range(16, 20)

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @staticmethod
    def of_parameter(message: str) -> CompareException:
        """Return the exception of an argument that is not as expected."""
        return CompareException(CompareException.INVALID_PARAM_ERROR, message)
