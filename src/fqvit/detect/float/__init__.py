"""Detection in float: the pipeline that fixed/ approximates with integers."""
