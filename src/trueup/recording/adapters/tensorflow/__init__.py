"""The TensorFlow adapter: Keras layers become calls of level `module`, TensorFlow's operations calls of level `api`.

`session` is what `trueup.capture` begins; `armed` is what an unedited script gets when TensorFlow is imported under
`trueup capture -- COMMAND`. docs/architecture.md says what each file is for. Nothing here imports PyTorch or PaddlePaddle.
"""
