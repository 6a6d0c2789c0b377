"""Files of weights and tensors, read without running anything in them: what a pickle names becomes an inert stand-in.

`reading.open_checkpoint` says what a checkpoint holds, tensor by tensor, `reading.torch_archive` what one file of ``torch.save``
does; `inert` is the one place that unpickles. No framework is needed. Whoever reads weights, or a dump of tensors, reads them here.
"""
