"""Workers that share the work, as torchrun starts them."""
