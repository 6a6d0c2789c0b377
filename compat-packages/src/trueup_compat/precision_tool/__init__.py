"""precision_tool (TensorFlow on Ascend) over Trueup: `tf_config` for training scripts, `cli` for the prompt.

`config` holds the tool's settings and its folders below ``precision_data``, `keys` what it writes into a session's config for
those who have the device, `recording` the native capture or watch in the place of the device's dump. Only `tf_config` imports
TensorFlow.
"""
