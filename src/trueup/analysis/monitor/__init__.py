"""A training's numbers by step, all the time: written as series, judged by alerts, compared with another run's, drawn as a heat
map.

`session` is the running monitor, over a framework's probe (`trueup.recording.engine.monitoring`), also in a process that `trueup
monitor` started; `kinds` is the table of series, joins those of several ranks, and looks at how two runs begin; `alerts` finds what
leaves its own past; `comparing` lines up two runs; `trend` gives the cells of the heat map. Used by ``trueup monitor``, ``compare``
and ``report --trend``. Nothing is imported here.
"""
