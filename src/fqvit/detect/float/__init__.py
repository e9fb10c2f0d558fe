"""Detection in float: the reference that the integer pipeline in fixed/ approximates."""
