"""The TensorFlow adapter: Keras layers become calls of level `module`, TensorFlow's operations calls of level `api`.

`capture` is the context manager behind `trueup.capture`; `armed` is what an unedited script gets when TensorFlow is imported under
`trueup capture -- COMMAND`. The parts: `session` holds them together; `operations` hears of every operation that executes or is put
into a graph; `layers` stands around Keras layers, `gradients` around gradient functions, `optimizers` ends steps; `functions`
gives each ``tf.function`` a twin whose graph has taps (`taps`), and `programs` turns what they bring into calls; `sessions` fetches
what a session of TensorFlow 1 computes; `nodes` is a call of either kind; `tensors` and `host` turn tensors into rows; `scopes` and
`environment` name layers and switches; `watching` and `watching_session` watch.

Nothing here imports PyTorch or PaddlePaddle, and TensorFlow is never recorded in a process that holds Paddle: loaded in the wrong
order the two crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.recording.adapters.tensorflow.capturing import capture as capture

__all__ = ["capture"]


def __getattr__(name: str) -> Any:
    """Load the session when it is asked for: an armed data worker never does."""
    if name not in __all__:
        raise AttributeError(f"module 'trueup.recording.adapters.tensorflow' has no attribute {name!r}")
    from trueup.recording.adapters.tensorflow import capturing

    return getattr(capturing, name)
