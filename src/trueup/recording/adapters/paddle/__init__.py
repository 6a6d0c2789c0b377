"""The PaddlePaddle adapter: what executes in dynamic mode becomes calls at the levels `module` (Layers) and `api` (operators).

`session` is what `trueup.capture` begins; `armed` is what an unedited script gets when Paddle is imported under
`trueup capture -- COMMAND`. docs/architecture.md says what each file is for. Nothing here imports PyTorch.
"""
