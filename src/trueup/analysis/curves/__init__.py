"""Curves of a number over a training's steps (loss, accuracy), a baseline's repeats beside a candidate's, with a verdict.

`run` is what a curve is and which one of a run is meant; `statistics` tests one number a run (equivalence, power, repeats needed)
and looks along the steps (first divergence, spikes, change points, slopes, later by how many steps); `judging` puts a verdict
together. Files are read in `trueup.exchange.curves`. Used by ``trueup curves`` and by what ``trueup compare`` says of its losses,
for which `statistics` needs NumPy alone: nothing is imported here.
"""
