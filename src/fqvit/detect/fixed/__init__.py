"""Detection with integers only: the arithmetic between the networks, and the detector that combines them."""
