"""The PyTorch adapter: what executes on any device becomes calls at the levels `module`, `api` and `aten`.

`session` is what `trueup.capture` begins; `armed` is what an unedited script gets when PyTorch is imported under
`trueup capture -- COMMAND`. docs/architecture.md says what each file is for.
"""
