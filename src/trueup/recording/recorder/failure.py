"""What goes wrong in the observer: told once, kept from the training unless the user asked for the contrary."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Literal

from trueup.foundation.model import RunStopped

if TYPE_CHECKING:
    from trueup.recording.recorder.recorder import Recorder


class Failure:
    """Reports the first thing that goes wrong in the observer, on stderr and in the manifest's notes."""

    def __init__(self, recorder: Recorder, on_error: Literal["continue", "stop"]) -> None:
        self._recorder, self._on_error = recorder, on_error
        self.text: str | None = None
        """What went wrong; None while all is well."""

    def take(self, error: Exception, what: str) -> bool:
        """Report an exception; return whether the training goes on as if it had not been raised.

        Raises:
            RunStopped: the user asked to stop in this case.
        """
        if self._on_error == "stop":
            if isinstance(error, RunStopped):
                return False
            raise RunStopped(f"capture stopped, and the run with it, as asked: {_sentence(error, what)}") from error
        if self.text is None:
            self.text = f"capture stopped at step {self._recorder.step}: {_sentence(error, what)}"
            self._recorder.note(f"{self.text}; what ran later is missing")
            print(f"trueup: {self.text}. The training goes on without it.", file=sys.stderr, flush=True)
        return True


def _sentence(error: Exception, what: str) -> str:
    said = (str(error).splitlines() or [""])[0]
    place = "".join(f"in {f.name}, {f.filename}:{f.lineno}, " for f in traceback.extract_tb(error.__traceback__)[-1:])
    return f"{type(error).__name__}: {said} ({place}while recording {what})"
