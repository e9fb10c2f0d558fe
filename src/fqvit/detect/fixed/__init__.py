"""Detection in integers: everything between the networks, and the whole detector."""
