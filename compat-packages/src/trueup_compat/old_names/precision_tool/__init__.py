"""`import precision_tool.tf_config`, answered by `trueup_compat.precision_tool`."""
